"""From the configuration to a loaded core, in whichever process it shall run.

torch is imported here alone, and only for the torch runner: a simulated engine starts without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvoy_contract import byte_tokenizer
from kvoy_engine.batch import Runner, RunnerInfo
from kvoy_engine.config import MIB, EngineConfig
from kvoy_engine.core import EngineCore
from kvoy_engine.core_config import CoreConfig
from kvoy_engine.step_log import LoggedRunner

Progress = Callable[[str], None]

SIM_MAX_MODEL_LEN: Final = 32768
SIM_NUM_BLOCKS: Final = 4096
SIM_MEMORY_SHARE: Final = 0.9
"""What --gpu-memory-utilization stands for that many blocks."""
SIM_TOKEN_BYTES: Final = MIB // 8
"""KV cache of one token of an 8-billion-parameter model with grouped-query attention."""
_DTYPE_ALIASES: Final = {"half": "float16", "float": "float32"}


class ModelLoadFailed(Exception):
    """The model cannot be loaded; the message is one line for people."""


@dataclass(frozen=True, slots=True)
class CoreInfo:
    """What the server needs to know of a loaded core. Serialisable."""

    runner: RunnerInfo
    model_identity: str
    """Of the weights; seeds the block hashes."""
    token_limit: int
    """Tokens of prompt and completion that one sequence can have."""
    max_num_seqs: int
    max_num_batched_tokens: int
    hash_stride: int


@dataclass(frozen=True, slots=True)
class BuiltCore:
    core: EngineCore
    info: CoreInfo
    close: Callable[[], None]


def build_core(config: EngineConfig, progress: Progress) -> BuiltCore:
    """Load the model, where there is one. Raises ModelLoadFailed."""
    if config.is_sim:
        runner: Runner = _sim_runner(config)
        identity = f"sim:{config.model_ref}"
    else:
        runner, identity = _torch_runner(config, progress)
    if config.step_log is not None:
        try:
            runner = LoggedRunner(runner, Path(config.step_log))
        except OSError as error:
            runner.close()
            raise ModelLoadFailed(f"--step-log {config.step_log}: {error.strerror}") from None
    return assemble(runner, identity, config)


def assemble(runner: Runner, model_identity: str, config: EngineConfig) -> BuiltCore:
    """A core around a loaded runner. Raises ModelLoadFailed for limits that do not go together."""
    info = runner.info
    try:
        core_config = CoreConfig(
            num_blocks=info.num_blocks,
            max_model_len=min(info.max_model_len, config.max_model_len or info.max_model_len),
            block_size=info.block_size,
            hash_stride=config.hash_stride,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.token_budget,
            max_waiting=config.max_num_waiting,
            enable_prefix_caching=config.enable_prefix_caching,
            interference_ratio=config.interference_ratio,
            background_ratio=config.background_ratio,
            max_step_s=config.max_step_s,
        )
    except ValueError as error:
        runner.close()
        raise ModelLoadFailed(str(error)) from None
    core_info = CoreInfo(
        runner=info,
        model_identity=model_identity,
        token_limit=core_config.token_limit,
        max_num_seqs=core_config.max_num_seqs,
        max_num_batched_tokens=core_config.max_num_batched_tokens,
        hash_stride=core_config.hash_stride,
    )
    return BuiltCore(EngineCore(runner, core_config), core_info, runner.close)


def _sim_runner(config: EngineConfig) -> Runner:
    from kvoy_engine.sim_runner import PRINTABLE_ASCII, SimRunner
    from kvoy_engine.timing_model import TimingModel

    if config.tokenizer is None:
        vocab_size, token_ids = byte_tokenizer.VOCAB_SIZE, PRINTABLE_ASCII
    else:
        vocab_size, token_ids = plain_token_ids(Path(config.tokenizer))
    block_bytes = SIM_TOKEN_BYTES * config.block_size
    share = config.gpu_memory_utilization or SIM_MEMORY_SHARE
    num_blocks = config.num_gpu_blocks_override or max(
        1, round(SIM_NUM_BLOCKS * share / SIM_MEMORY_SHARE)
    )
    if config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is not None:
        num_blocks = max(1, config.kv_cache_memory_bytes // block_bytes)
    return SimRunner(
        TimingModel(
            base_s=config.sim_base_s,
            prefill_tokens_per_s=config.sim_prefill_tokens_per_s,
            context_token_s=config.sim_context_token_s,
            row_s=config.sim_row_s,
        ),
        num_blocks=num_blocks,
        block_size=config.block_size,
        block_bytes=block_bytes,
        max_model_len=config.max_model_len or SIM_MAX_MODEL_LEN,
        vocab_size=vocab_size,
        token_ids=token_ids,
    )


def plain_token_ids(folder: Path) -> tuple[int, tuple[int, ...]]:
    """(vocabulary size, ids of plain ASCII words) of a tokenizer, read without loading it.

    A simulated model speaks these, so that its text is printable. Raises ModelLoadFailed.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer: dict[str, Any] = json.loads(path.read_bytes())
        vocabulary = tokenizer["model"]["vocab"]
        added = tokenizer.get("added_tokens", [])
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadFailed(f"{path} is no tokenizer: {error}") from None
    items = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((entry[0], index) for index, entry in enumerate(vocabulary))
    )
    # Byte-level and SentencePiece vocabularies mark a leading space by one of these.
    ids = {token_id: token.lstrip("Ġ▁") for token, token_id in items}
    special = {token["id"] for token in added}
    words = sorted(i for i, word in ids.items() if word.isascii() and word.isalpha())
    words = [token_id for token_id in words if token_id not in special]
    if not words:
        raise ModelLoadFailed(f"{path} has no plain words for a simulated model to speak")
    return max(*ids, *special, 0) + 1, tuple(words)


def _torch_runner(config: EngineConfig, progress: Progress) -> tuple[Runner, str]:
    """The model itself; importing torch takes seconds, so nothing else here does."""
    from kvoy_engine.identity import model_identity
    from kvoy_engine.model_config import ModelError
    from kvoy_engine.model_runner import load_runner
    from kvoy_engine.runner_options import RunnerOptions

    folder = Path(config.model_ref)
    options = RunnerOptions(
        dtype=_DTYPE_ALIASES.get(config.dtype, config.dtype),  # type: ignore[arg-type]
        kv_cache_dtype=config.kv_cache_dtype,  # type: ignore[arg-type]
        device=config.device,
        num_threads=config.num_threads,
        block_size=config.block_size,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_blocks=config.num_gpu_blocks_override,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.token_budget,
        kernels=config.kernels,  # type: ignore[arg-type]
    )
    try:
        return load_runner(folder, options, progress), model_identity(folder)
    except (ModelError, OSError, ValueError) as error:
        raise ModelLoadFailed(f"{folder}: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        raise ModelLoadFailed(f"{folder}: out of memory: {first_line(error)}") from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """torch has a type for CUDA's lack of memory, and none for the CPU's."""
    words = str(error)
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in words


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no more could be allocated")
