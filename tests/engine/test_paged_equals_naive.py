"""Batched, chunked, cached and mixed steps against one uncached pass over each sequence alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from kvoy_engine.batch import Batch, Row
from kvoy_engine.comparator import (
    Exactness,
    Reference,
    compare_logits,
    compare_tokens,
    margins,
)
from kvoy_engine.messages import SamplingParams
from kvoy_engine.model_runner import RunnerOptions, TorchRunner, load_runner
from kvoy_engine.testing import Kind, write_tiny_model

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
BLOCK_SIZE = 16

SHAPES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "windowed mistral": ("mistral", {"sliding_window": 24}),
    "one head a group": ("llama", {"num_key_value_heads": 4}),
    "groups of five, odd sizes": (
        "llama",
        {
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "hidden_size": 52,
            "intermediate_size": 70,
        },
    ),
    "large heads": ("llama", {"head_dim": 128, "num_attention_heads": 14, "hidden_size": 80}),
}


@dataclass(eq=False)
class Tracked:
    """One sequence as a scheduler would see it."""

    seq_id: int
    prompt: list[int]
    table: list[int]
    computed: int = 0
    output: list[int] = field(default_factory=list)

    def next_row(self, limit: int) -> Row:
        tokens = (self.prompt + self.output)[self.computed :][:limit]
        is_last = self.computed + len(tokens) == len(self.prompt) + len(self.output)
        return Row(
            seq_id=self.seq_id,
            token_ids=tokens,
            start=self.computed,
            block_table=self.table,
            samples=is_last,
            params=GREEDY,
            choice=0,
            prompt_ids=self.prompt,
            output_ids=self.output,
        )


def naive_run(runner: TorchRunner, prompt: Sequence[int], num_tokens: int) -> Reference:
    """Recompute the whole sequence for every token."""
    table = range(runner.info.num_blocks)
    token_ids: list[int] = []
    gaps: list[float] = []
    for _ in range(num_tokens):
        last = runner.logits([*prompt, *token_ids], table)[-1:]
        token_ids.append(int(last.argmax()))
        gaps += margins(last)
    return Reference(token_ids, gaps)


def mixed_run(
    runner: TorchRunner, prompts: Sequence[list[int]], num_tokens: int, seed: int
) -> list[list[int]]:
    """Steps of random subsets and chunk sizes over scattered blocks."""
    chance = random.Random(seed)
    free = list(range(runner.info.num_blocks))
    chance.shuffle(free)
    sequences = []
    for seq_id, prompt in enumerate(prompts):
        num_blocks = -(-(len(prompt) + num_tokens) // BLOCK_SIZE)
        sequences.append(Tracked(seq_id, prompt, [free.pop() for _ in range(num_blocks)]))
    while live := [each for each in sequences if len(each.output) < num_tokens]:
        picked = chance.sample(live, chance.randint(1, len(live)))
        rows = [each.next_row(chance.choice([1, 7, 16, 50, 200])) for each in picked]
        for each, row, result in zip(picked, rows, runner.run(Batch(rows)).rows, strict=True):
            assert result.error is None
            each.computed += row.num_tokens
            if result.token_id is not None:
                each.output.append(result.token_id)
    return [each.output for each in sequences]


def random_prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(256) for _ in range(n)] for n in (1, 5, 16, 33, 90, 170)]


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., TorchRunner]:
    def load(shape: str, **options: Any) -> TorchRunner:
        kind, overrides = SHAPES[shape]
        folder = write_tiny_model(tmp_path / shape.replace(" ", "-"), kind, **overrides)
        return load_runner(folder, RunnerOptions(num_blocks=64, **options), lambda _: None)

    return load


@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_batches_give_the_very_tokens_of_naive_runs_in_float64(
    tiny: Callable[..., TorchRunner], shape: str
) -> None:
    runner = tiny(shape, dtype="float64")
    prompts = random_prompts(1)

    results = mixed_run(runner, prompts, num_tokens=12, seed=2)

    for prompt, token_ids in zip(prompts, results, strict=True):
        verdict = compare_tokens(naive_run(runner, prompt, 12), token_ids, Exactness.EXACT)
        assert verdict.is_equal, verdict.reason


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_batches_equal_naive_runs_in_float32(
    tiny: Callable[..., TorchRunner], shape: str, kernels: str
) -> None:
    runner = tiny(shape, dtype="float32", kernels=kernels)
    prompts = random_prompts(3)

    results = mixed_run(runner, prompts, num_tokens=10, seed=4)

    for prompt, token_ids in zip(prompts, results, strict=True):
        verdict = compare_tokens(naive_run(runner, prompt, 10), token_ids, Exactness.MARGIN)
        assert verdict.is_equal, verdict.reason


@pytest.mark.parametrize("shape", SHAPES)
def test_native_kernels_give_the_logits_of_plain_torch(
    tiny: Callable[..., TorchRunner], shape: str
) -> None:
    plain = tiny(shape, dtype="float64", kernels="torch")
    native = tiny(shape, dtype="float32", kernels="native")
    prompt = random_prompts(5)[-1]

    comparison = compare_logits(
        plain.logits(prompt, range(64)), native.logits(prompt, range(63, -1, -1))
    )

    assert comparison.is_float32_equal, comparison
    assert native.info.details["kernels"] == "native"


@pytest.mark.parametrize("kv_cache_dtype", ["float16", "bfloat16"])
def test_a_half_precision_cache_stays_close(
    tiny: Callable[..., TorchRunner], kv_cache_dtype: str
) -> None:
    plain = tiny("llama", dtype="float32", kernels="torch", kv_cache_dtype=kv_cache_dtype)
    native = tiny("llama", dtype="float32", kernels="native", kv_cache_dtype=kv_cache_dtype)
    prompt = random_prompts(6)[-1]

    comparison = compare_logits(plain.logits(prompt, range(64)), native.logits(prompt, range(64)))

    # Keys and values on the border between two half-precision numbers may round either way.
    assert comparison.max_difference < 0.05, comparison
    assert comparison.top1_agreement > 0.97, comparison


def test_a_block_poisoned_by_nan_harms_no_sequence_that_only_holds_it_unused(
    tiny: Callable[..., TorchRunner],
) -> None:
    for kernels in ("torch", "native"):
        runner = tiny("llama", dtype="float32", kernels=kernels)
        prompt = random_prompts(7)[3]
        clean = mixed_run(runner, [prompt, prompt[:5]], num_tokens=4, seed=8)

        runner.cache.tensor.fill_(torch.nan)
        again = mixed_run(runner, [prompt, prompt[:5]], num_tokens=4, seed=8)

        assert again == clean
