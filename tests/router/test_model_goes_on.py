"""A model's answer goes on from another engine exactly: sampling, penalties, logprobs and echo."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvoy_contract.prompt import TokenizerFiles
from kvoy_engine.build import build_core
from kvoy_engine.config import EngineConfig
from kvoy_engine.testing import write_tiny_model
from kvoy_engine.testing_server import running_engine
from kvoy_router.failover_testing import Bench, Seen, bench
from kvoy_router.testing import SECRET

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@contextlib.asynccontextmanager
async def exact(folder: Path) -> AsyncIterator[Bench]:
    """Two engines in float64 on plain torch, where results are exact."""
    config = EngineConfig(
        model=str(folder),
        port=0,
        secret=SECRET,
        dtype="float64",
        kernels="torch",
        num_threads=1,
        num_gpu_blocks_override=64,
        served_model_name=("tiny",),
        enable_prefix_caching=False,
    )
    files = TokenizerFiles.from_folder(folder)
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            runner = build_core(config, lambda text: None).core.runner
            engines.append(
                await stack.enter_async_context(
                    running_engine(config, runner=runner, tokenizer=files)
                )
            )
        yield await stack.enter_async_context(bench(engines))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "logprobs": 1, "echo": True},
        {"seed": 11, "temperature": 0.9, "top_p": 0.95, "logprobs": 1, "n": 2},
        {
            "seed": 12,
            "temperature": 0.8,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.6,
            "repetition_penalty": 1.2,
        },
    ],
    ids=["greedy with logprobs", "echo", "seeded choices", "penalties"],
)
async def test_a_models_answer_goes_on_exactly(folder: Path, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": [40 + i for i in range(20)], "max_tokens": 16} | fields
    async with exact(folder) as bench:
        whole = await bench.ask(body)
        (size,) = bench.cuts.num_bytes

        for position in random.Random(4).sample(range(size // 4, size), 6):
            seen = await bench.ask(body, position)
            round_logprobs(seen)
            round_logprobs(whole)
            seen.assert_equals(whole)


async def test_logprobs_of_held_back_text_are_told_once(folder: Path) -> None:
    async with exact(folder) as bench:
        body = {"model": "tiny", "prompt": "a b", "max_tokens": 24, "temperature": 0, "logprobs": 1}
        plain = await bench.ask(body)
        third = len(plain.texts[0]) // 3
        body["stop"] = [plain.texts[0][third : third + 4], "zq" * 20]
        whole = await bench.ask(body)
        (size,) = bench.cuts.num_bytes
        round_logprobs(whole)

        for position in range(size // 3, size, max(1, size // 10)):
            seen = await bench.ask(body, position)
            round_logprobs(seen)
            seen.assert_equals(whole)


def round_logprobs(seen: Seen) -> None:
    """Another batch shape rounds differently in the last bits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 8)
        if isinstance(value, dict):
            return {key: rounded(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [rounded(each) for each in value]
        return value

    seen.logprobs = rounded(seen.logprobs)
