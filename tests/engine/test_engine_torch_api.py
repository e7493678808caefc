"""A tiny random model behind the engine's HTTP surface: cache and preemption change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvoy_contract.prompt import TokenizerFiles
from kvoy_engine.build import build_core
from kvoy_engine.config import EngineConfig
from kvoy_engine.testing import write_tiny_model
from kvoy_engine.testing_server import running_engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@asynccontextmanager
async def client_of(folder: Path, num_blocks: int) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of an engine in float64 on plain torch, where results are exact."""
    config = EngineConfig(
        model=str(folder),
        port=0,
        dtype="float64",
        kernels="torch",
        num_threads=1,
        num_gpu_blocks_override=num_blocks,
    )
    runner = build_core(config, lambda text: None).core.runner
    files = TokenizerFiles.from_folder(folder)
    async with (
        running_engine(config, runner=runner, tokenizer=files) as engine,
        httpx.AsyncClient(base_url=engine.url, timeout=120) as client,
    ):
        yield client


async def complete(client: httpx.AsyncClient, folder: Path, **fields: Any) -> dict[str, Any]:
    body = {"model": str(folder), "temperature": 0} | fields
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def assert_same(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """The very same text and tokens; logprobs may differ by the rounding of another batch shape."""
    (one,), (other,) = answer["choices"], expected["choices"]
    assert one["text"] == other["text"]
    assert one["finish_reason"] == other["finish_reason"]
    assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
    assert one["logprobs"]["token_logprobs"] == pytest.approx(
        other["logprobs"]["token_logprobs"], abs=1e-9
    )


@pytest.mark.parametrize("length", [16, 32, 31, 33])
async def test_a_prompt_that_is_cached_whole_answers_as_when_it_was_cold(
    folder: Path, length: int
) -> None:
    prompt = [32 + i for i in range(length)]
    async with client_of(folder, num_blocks=64) as client:
        cold, *warm = [
            await complete(client, folder, prompt=prompt, max_tokens=8, logprobs=2)
            for _ in range(3)
        ]
        scored = await complete(client, folder, prompt=prompt, max_tokens=8, logprobs=2, echo=True)

    for answer in warm:
        assert_same(answer, cold)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= length - 1
    logprobs = scored["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == length + 8
    assert logprobs["token_logprobs"][0] is None
    expected = cold["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs["token_logprobs"][length:] == pytest.approx(expected, abs=1e-9)


async def test_texts_are_the_same_when_sequences_are_preempted(folder: Path) -> None:
    asks = [
        {
            "prompt": [60 + j % 40 for j in range(48)] + [40 + i] * 16,
            "max_tokens": 60,
            "ignore_eos": True,
            "logprobs": 0,
        }
        for i in range(8)
    ]

    async def run(num_blocks: int) -> tuple[list[Any], str]:
        async with client_of(folder, num_blocks) as client:
            answers = await asyncio.gather(*(complete(client, folder, **ask) for ask in asks))
            return list(answers), (await client.get("/metrics")).text

    squeezed, metrics = await run(26)
    roomy, _ = await run(256)

    assert "kvoy_engine_preemptions_total 0.0" not in metrics
    for answer, expected in zip(squeezed, roomy, strict=True):
        assert_same(answer, expected)
        assert answer["usage"]["completion_tokens"] == 60
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 60


PENALISED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 2.0},
    {"top_k": 1, "seed": 99, "temperature": 1.0},
    {"frequency_penalty": 2.0, "presence_penalty": 2.0},
    {},
    {"logit_bias": {"65": 8.0, "66": -100}},
    {"min_tokens": 20, "stop_token_ids": [70, 71, 72]},
    {"temperature": 1.0, "seed": 5, "top_p": 0.8, "min_p": 0.01},
)


async def test_sampling_of_a_request_knows_nothing_of_its_neighbours(folder: Path) -> None:
    prompt = [60 + i % 7 for i in range(20)]
    asks = [{"prompt": prompt, "max_tokens": 40, "logprobs": 0} | own for own in PENALISED]
    # This one ends early, so that the rows behind it move.
    asks.append({"prompt": prompt[:9], "max_tokens": 3, "logprobs": 0})
    orders = [
        list(range(8)),
        list(reversed(range(8))),
        [7, 0, 2, 4, 6, 1, 3, 5],
        [3, 1, 7, 5, 0, 6, 4, 2],
    ]

    async with client_of(folder, num_blocks=256) as client:
        alone = [await complete(client, folder, **ask) for ask in asks]
        for order in orders:
            answers = await asyncio.gather(*(complete(client, folder, **asks[i]) for i in order))
            for i, answer in zip(order, answers, strict=True):
                assert_same(answer, alone[i])

    # The settings do have an effect: with none at all, every text would be equal, too.
    plain = alone[3]["choices"][0]["logprobs"]["tokens"]
    assert alone[1]["choices"][0]["logprobs"]["tokens"] == plain
    assert all(alone[i]["choices"][0]["logprobs"]["tokens"] != plain for i in (0, 2, 4, 6))
