"""The torch runner: a batch becomes tensors, logits and tokens.

Prefill chunks and decodes of a step go through one forward pass. The head is computed only for rows
that sample or report prompt logprobs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from kvoy_contract.host_limits import host_memory, num_usable_cores
from kvoy_engine.attention import PagedAttention
from kvoy_engine.batch import Batch, Row, RowOutput, RunnerInfo, RunnerOutput
from kvoy_engine.kernels import prebuilt
from kvoy_engine.kernels.build import KernelsUnavailable
from kvoy_engine.kernels.prebuilt import Kernels
from kvoy_engine.kv_cache import KvCache, KvShape
from kvoy_engine.linear import WeightFormat
from kvoy_engine.messages import SamplingParams, TokenLogprob
from kvoy_engine.model_config import ModelConfig, ModelError, load_model_config
from kvoy_engine.models.llama import LlamaDecoder, load_decoder
from kvoy_engine.native_ops import ACTIVATION_DTYPES, KV_DTYPES, NativeOps
from kvoy_engine.numerics import numerics_digest
from kvoy_engine.ops import Ops, TorchOps
from kvoy_engine.rope import rope_tables
from kvoy_engine.runner_options import RunnerOptions
from kvoy_engine.sampler import NOT_FINITE, Greedy, logprob_entries, sample, torch_greedy
from kvoy_engine.step_inputs import StepInputs, build_inputs
from kvoy_engine.weight_format import DTYPES, choose_format
from kvoy_engine.weights import WeightFiles

__all__ = ["RunnerOptions", "TorchRunner", "load_runner"]

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
_HEAD_ROWS = 256
"""Rows of logits made at once for prompt logprobs: bounds their memory."""
_MAX_DEFAULT_HOST_KV_BYTES = 4 << 30
_DEFAULT_DEVICE_SHARE = 0.9


class TorchRunner:
    """Satisfies `batch.Runner`. Called by one thread at a time."""

    def __init__(
        self,
        decoder: LlamaDecoder,
        ops: Ops,
        cache: KvCache,
        info: RunnerInfo,
        greedy: Greedy = torch_greedy,
    ) -> None:
        self._decoder = decoder
        self._ops = ops
        self._cache = cache
        self._info = info
        self._greedy = greedy
        self._device = cache.tensor.device

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def cache(self) -> KvCache:
        return self._cache

    def run(self, batch: Batch) -> RunnerOutput:
        start = time.perf_counter()
        with torch.inference_mode():
            rows = self._run(batch.rows) if batch.rows else []
        return RunnerOutput(rows=rows, duration_s=time.perf_counter() - start)

    def logits(self, token_ids: Sequence[int], block_table: Sequence[int]) -> torch.Tensor:
        """(len(token_ids), vocab_size) teacher-forced logits of one uncached sequence.

        Overwrites the blocks of the table. For comparisons; nothing that serves calls it.
        """
        row = Row(
            seq_id=-1,
            token_ids=token_ids,
            start=0,
            block_table=block_table,
            samples=False,
            params=SamplingParams(max_tokens=1),
            choice=0,
            prompt_ids=token_ids,
            output_ids=(),
        )
        with torch.inference_mode():
            hidden = self._decoder.forward(self._inputs([row]), self._ops, None)
            return self._decoder.logits(hidden).cpu()

    def free_device_bytes(self) -> int:
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            return int(free)
        return host_memory().available

    def close(self) -> None:
        """Nothing to end: memory goes with the object."""

    def _inputs(self, rows: Sequence[Row]) -> StepInputs:
        return build_inputs(Batch(rows=rows), self._cache.shape.block_size, self._device)

    def _run(self, rows: Sequence[Row]) -> list[RowOutput]:
        inputs = self._inputs(rows)
        last = torch.from_numpy(inputs.query_offsets[1:].astype(np.int64) - 1).to(self._device)
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        if any(row.wants_prompt_logprobs for row in rows):
            every = self._decoder.forward(inputs, self._ops, None)
            prompt_logprobs = self._prompt_logprobs(rows, inputs, every)
            hidden = every[last]
        else:
            is_decode_only = inputs.num_tokens == inputs.num_rows
            selected = None if is_decode_only else last
            hidden = self._decoder.forward(inputs, self._ops, selected)

        # A row's last token has seen all of the row: what is broken anywhere in it shows here.
        outputs = [
            RowOutput() if is_finite else RowOutput(error=NOT_FINITE)
            for is_finite in torch.isfinite(hidden.sum(dim=-1)).tolist()
        ]
        sampling = [i for i, row in enumerate(rows) if row.samples and outputs[i].error is None]
        if sampling:
            states = hidden if len(sampling) == len(rows) else hidden[sampling]
            logits = self._decoder.logits(states)
            sampled = sample(logits, [rows[i] for i in sampling], self._greedy)
            for i, output in zip(sampling, sampled, strict=True):
                outputs[i] = output
        for i, entries in prompt_logprobs.items():
            if outputs[i].error is None:
                outputs[i] = msgspec.structs.replace(outputs[i], prompt_logprobs=entries)
        return outputs

    def _prompt_logprobs(
        self, rows: Sequence[Row], inputs: StepInputs, hidden: torch.Tensor
    ) -> dict[int, list[TokenLogprob]]:
        """Row index to entries; `hidden` is (T, hidden_size) of all tokens."""
        reports: dict[int, list[TokenLogprob]] = {}
        for i, row in enumerate(rows):
            if not row.wants_prompt_logprobs:
                continue
            begin = int(inputs.query_offsets[i])
            targets = row.prompt_ids[row.start + 1 : row.start + 1 + row.num_tokens]
            num_top = row.params.prompt_logprobs or 0
            entries: list[TokenLogprob] = []
            for offset in range(0, len(targets), _HEAD_ROWS):
                ids = targets[offset : offset + _HEAD_ROWS]
                states = hidden[begin + offset : begin + offset + len(ids)]
                logprobs = torch.log_softmax(self._decoder.logits(states), dim=-1)
                entries += logprob_entries(logprobs, ids, [num_top] * len(ids))
            reports[i] = entries
        return reports


def load_runner(model_dir: Path, options: RunnerOptions, progress: Progress) -> TorchRunner:
    """Load a model folder and everything that running it needs.

    Raises ModelError (also its kinds UnsupportedModel and WeightsError) for the model, ValueError
    for the options, both with the reason in one sentence.
    """
    device = _device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(options.num_threads or num_usable_cores())
    config = load_model_config(model_dir)
    kernels, no_kernels = _kernels(options, device, progress)
    library = None if kernels is None else kernels.library
    choice = choose_format(options.dtype, config, device, library)
    logger.info("weight format chosen", extra={"format": choice.format.name})
    progress(f"weight format: {choice.format.name}")
    with WeightFiles(model_dir) as files, torch.inference_mode():
        decoder = load_decoder(files, config, choice.format, device, progress)

    kv_dtype = _kv_dtype(options, choice.format)
    shape = KvShape.of(config, options.block_size, kv_dtype)
    num_blocks = _num_blocks(options, config, shape, device)
    max_model_len = _max_model_len(options, config, num_blocks * shape.block_size)
    cache = KvCache(shape, num_blocks, device)
    double = kv_dtype == torch.float64
    cos, sin = rope_tables(
        config.rope,
        config.head_dim,
        max_model_len,
        torch.float64 if double else torch.float32,
        device,
    )
    ops: Ops
    greedy = torch_greedy
    reason = no_kernels or _why_not_native(cache, choice.format)
    variant = "torch"
    if kernels is not None and reason is None:
        threads, activations = torch.get_num_threads(), choice.format.activation_dtype
        ops = NativeOps(kernels.library, config, cache, cos, sin, activations, threads)
        greedy, variant = ops.greedy, kernels.variant
    elif options.kernels == "native":
        raise ValueError(f"kernels native: {reason}")
    else:
        attention = PagedAttention(config, cache, cos, sin)
        ops = TorchOps(attention, config.rms_norm_eps, choice.format.activation_dtype)
    info = RunnerInfo(
        num_blocks=num_blocks,
        block_size=shape.block_size,
        block_bytes=shape.block_bytes,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        numerics=numerics_digest(choice.format, kv_dtype, device, variant),
        weights_bytes=decoder.weights_bytes,
        details={
            "device": _device_name(device),
            "weights": choice.format.name,
            "kv cache": str(kv_dtype).removeprefix("torch."),
            "kernels": f"torch ({reason})" if reason else variant,
            "threads": str(torch.get_num_threads()),
            **choice.explain(),
        },
    )
    return TorchRunner(decoder, ops, cache, info, greedy)


def _kernels(
    options: RunnerOptions, device: torch.device, progress: Progress
) -> tuple[Kernels | None, str | None]:
    """The compiled kernels, or why there are none."""
    if options.kernels == "torch":
        return None, "chosen"
    if device.type != "cpu":
        return None, "the kernels are for the CPU"
    progress("CPU kernels, compiled ahead or by the first start on a machine")
    try:
        return prebuilt.load(), None
    except KernelsUnavailable as error:
        logger.warning("no compiled kernels, plain torch is slower", extra={"reason": str(error)})
        return None, str(error)


def _why_not_native(cache: KvCache, weight_format: WeightFormat) -> str | None:
    if weight_format.activation_dtype not in ACTIVATION_DTYPES:
        return f"there are no kernels for {weight_format.name} activations"
    if cache.shape.dtype not in KV_DTYPES:
        return f"there are no kernels for a {cache.shape.dtype} cache"
    return None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not one of auto, cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no usable CUDA device")
    return device


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _kv_dtype(options: RunnerOptions, weight_format: WeightFormat) -> torch.dtype:
    if options.kv_cache_dtype == "auto":
        return weight_format.weight_dtype
    if options.kv_cache_dtype not in DTYPES:
        raise ValueError(f"kv_cache_dtype {options.kv_cache_dtype!r} is not one of {list(DTYPES)}")
    return DTYPES[options.kv_cache_dtype]


def _num_blocks(
    options: RunnerOptions, config: ModelConfig, shape: KvShape, device: torch.device
) -> int:
    """Raises ValueError when there is no memory for a single block."""
    if options.num_blocks is not None:
        if options.num_blocks < 1:
            raise ValueError(f"num_blocks is {options.num_blocks}, expected at least 1")
        return options.num_blocks
    budget = options.kv_cache_memory_bytes
    if budget is None:
        budget = _default_kv_bytes(options, config, device)
    if budget < shape.block_bytes:
        raise ValueError(
            f"out of memory: {max(0, budget)} bytes are free for KV blocks, and one block takes "
            f"{shape.block_bytes}"
        )
    return budget // shape.block_bytes


def _default_kv_bytes(options: RunnerOptions, config: ModelConfig, device: torch.device) -> int:
    share = options.gpu_memory_utilization
    if device.type == "cpu":
        memory = host_memory()
        if share is None:
            return min(memory.available // 4, _MAX_DEFAULT_HOST_KV_BYTES)
        total, free = memory.total, memory.available
    else:
        free, total = torch.cuda.mem_get_info(device)
        share = _DEFAULT_DEVICE_SHARE if share is None else share
    widest = max(3 * config.intermediate_size, config.q_size + 2 * config.kv_size)
    activations = options.max_num_batched_tokens * (widest + 6 * config.hidden_size) * 4
    logits = 3 * 4 * _HEAD_ROWS * config.vocab_size
    return int(total * share) - (total - free) - activations - logits


def _max_model_len(options: RunnerOptions, config: ModelConfig, capacity: int) -> int:
    wanted = options.max_model_len
    if wanted is None:
        return min(config.max_position_embeddings, capacity)
    if not 0 < wanted <= config.max_position_embeddings:
        raise ModelError(
            f"max_model_len {wanted}: the model's limit is {config.max_position_embeddings}"
        )
    if wanted > capacity:
        raise ValueError(f"max_model_len {wanted}: the KV blocks hold {capacity} tokens")
    return wanted
