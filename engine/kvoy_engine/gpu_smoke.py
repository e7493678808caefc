"""`python -m kvoy_engine.gpu_smoke`: does this machine's CUDA device compute what its CPU computes,
and how fast.

Tokens and logits in float32 are compared with the CPU's; then half precision is timed at several
batch sizes and set against the device's measured memory bandwidth. Without a model folder a random
model is written, so that nothing needs to be downloaded. Takes under four minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from kvoy_engine.batch import Batch, Row
from kvoy_engine.comparator import Exactness, Reference, compare_logits, compare_tokens, margins
from kvoy_engine.messages import SamplingParams
from kvoy_engine.model_runner import RunnerOptions, TorchRunner, load_runner
from kvoy_engine.testing import write_tiny_model

_GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
_NUM_TOKENS = 24
_BATCH_SIZES = (1, 8, 32, 128)
_PROMPT_LENGTHS = (512, 2048)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvoy_engine.gpu_smoke", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a model folder; random when left out")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu-smoke: torch finds no usable CUDA device on this machine", file=sys.stderr)
        return 1
    print(f"device: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        model_dir = arguments.model or _random_model(Path(folder))
        is_equal = _compare_with_cpu(model_dir)
        _measure(model_dir)
    return 0 if is_equal else 1


def _random_model(folder: Path) -> Path:
    """About 140 million parameters: large enough to time."""
    return write_tiny_model(
        folder,
        scale=0.03,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=32_000,
        max_position_embeddings=8192,
    )


def _compare_with_cpu(model_dir: Path) -> bool:
    def load(device: str) -> TorchRunner:
        options = RunnerOptions(dtype="float32", device=device, num_blocks=256)
        return load_runner(model_dir, options, _quiet)

    cpu, gpu = load("cpu"), load("cuda")
    prompts = [[(31 * i * i + 7 * p) % 250 for i in range(n)] for p, n in enumerate((3, 40, 257))]
    results = generate(gpu, prompts, _NUM_TOKENS)
    all_equal = True
    for prompt, token_ids in zip(prompts, results, strict=True):
        forced = [*prompt, *token_ids]
        table = range(-(-len(forced) // 16))
        cpu_logits = cpu.logits(forced, table)
        logits = compare_logits(cpu_logits, gpu.logits(forced, table))
        own = cpu_logits[len(prompt) - 1 : -1]
        reference = Reference(own.argmax(dim=-1).tolist(), margins(own))
        verdict = compare_tokens(reference, token_ids, Exactness.MARGIN)
        is_equal = verdict.is_equal and logits.is_float32_equal
        all_equal &= is_equal
        print(
            f"float32, prompt of {len(prompt)}: {'equal' if is_equal else 'DIFFERENT'}; "
            f"logits within {logits.max_difference:.1e}; {verdict.num_compared} tokens compared "
            f"{verdict.reason}"
        )
    return all_equal


def _measure(model_dir: Path) -> None:
    runner = load_runner(model_dir, RunnerOptions(device="cuda"), _quiet)
    bandwidth = _bandwidth_bytes_per_s()
    print(f"measured read bandwidth: {bandwidth / 1e9:.0f} GB/s; {runner.info.details}")
    for batch_size in _BATCH_SIZES:
        context = 256
        step_s = _decode_step_s(runner, batch_size, context)
        kv_bytes = batch_size * context * runner.info.block_bytes // runner.info.block_size
        share = (runner.info.weights_bytes + kv_bytes) / step_s / bandwidth
        print(
            f"decode, {batch_size:4} users: {batch_size / step_s:9.0f} tokens/s, "
            f"{step_s * 1e3:6.2f} ms a step, {share:6.1%} of bandwidth"
        )
    for length in _PROMPT_LENGTHS:
        seconds = min(_timed_step(runner, [_row(0, length, 0, length)]) for _ in range(3))
        print(f"prefill, {length:5} tokens: {length / seconds:9.0f} tokens/s")


def _decode_step_s(runner: TorchRunner, batch_size: int, context: int) -> float:
    rows = [_row(index, 1, context - 1, context) for index in range(batch_size)]
    _timed_step(runner, rows)
    times = sorted(_timed_step(runner, rows) for _ in range(20))
    return times[len(times) // 2]


def _row(index: int, num_tokens: int, start: int, context: int) -> Row:
    num_blocks = -(-context // 16)
    return Row(
        seq_id=index,
        token_ids=[(index + i) % 250 for i in range(num_tokens)],
        start=start,
        block_table=range(index * num_blocks, (index + 1) * num_blocks),
        samples=True,
        params=_GREEDY,
        choice=0,
        prompt_ids=(),
        output_ids=(),
    )


def _timed_step(runner: TorchRunner, rows: Sequence[Row]) -> float:
    start = time.perf_counter()
    runner.run(Batch(rows))  # ends with the token on the host, so nothing is still running
    return time.perf_counter() - start


def generate(
    runner: TorchRunner, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Greedy, all prompts batched: one step of prefills, then decodes."""
    size = runner.info.block_size
    longest = max(map(len, prompts)) + num_tokens
    tables = [
        range(i * (longest // size + 1), (i + 1) * (longest // size + 1))
        for i in range(len(prompts))
    ]
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(num_tokens):
        rows = [
            Row(
                seq_id=i,
                token_ids=outputs[i][-1:] if step else prompt,
                start=len(prompt) + step - 1 if step else 0,
                block_table=tables[i],
                samples=True,
                params=_GREEDY,
                choice=0,
                prompt_ids=prompt,
                output_ids=outputs[i],
            )
            for i, prompt in enumerate(prompts)
        ]
        for output, result in zip(outputs, runner.run(Batch(rows)).rows, strict=True):
            assert result.token_id is not None, result.error
            output.append(result.token_id)
    return outputs


def _bandwidth_bytes_per_s() -> float:
    data = torch.ones(1 << 28, dtype=torch.float32, device="cuda")  # 1 GiB
    data.sum().item()
    start = time.perf_counter()
    for _ in range(10):
        data.sum()
    torch.cuda.synchronize()
    return 10 * data.nbytes / (time.perf_counter() - start)


def _quiet(message: str) -> None:
    del message


if __name__ == "__main__":
    sys.exit(main())
