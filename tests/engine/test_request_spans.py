"""What an engine's spans tell of requests that end in other ways than with an answer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import httpx
import pytest

from kvoy_contract.testing_otlp import Collector, collecting
from kvoy_contract.tracing import ENDPOINT, Tracing, start_tracing
from kvoy_engine.testing_server import RunningEngine, running_engine, sim_config

PATH = "/v1/completions"
ROOT = f"POST {PATH}"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        yield collector


@pytest.fixture
def tracing(collector: Collector) -> Tracing:
    tracing = start_tracing("kvoy-engine", os.environ, time.monotonic)
    assert tracing is not None
    return tracing


async def eventually_idle(engine: RunningEngine) -> None:
    async with asyncio.timeout(30):
        await engine.server._routes.idle.wait()


async def test_a_refused_request_has_its_span_alone_and_is_no_error(
    collector: Collector, tracing: Tracing
) -> None:
    async with running_engine(sim_config(), tracing=tracing) as engine:
        body = {"model": "sim", "prompt": "x", "n": -1}
        async with httpx.AsyncClient(base_url=engine.url) as client:
            answer = await client.post(PATH, json=body)
    tracing.close()

    assert answer.status_code == 400
    (span,) = collector.spans
    assert (span.name, span.kind, span.is_error) == (ROOT, "server", False)
    assert span.attributes["kvoy.outcome"] == "refused"
    assert span.attributes["gen_ai.operation.name"] == "text_completion"


async def test_a_stream_whose_client_leaves_has_decoded_until_then(
    collector: Collector, tracing: Tracing
) -> None:
    body = {"model": "sim", "prompt": "a secret plan", "max_tokens": 1000, "stream": True}
    async with (
        running_engine(sim_config(sim_base_s=0.005), tracing=tracing) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
    ):
        async with client.stream("POST", PATH, json=body) as stream:
            await anext(stream.aiter_lines())
        await eventually_idle(engine)
    tracing.close()

    (root,) = collector.named(ROOT)
    assert root.attributes["kvoy.outcome"] == "aborted"
    assert not root.is_error
    names = [span.name for span in sorted(collector.spans, key=lambda span: span.start_ns)]
    assert set(names) == {ROOT, "queue", "prefill", "decode"}
    (decode,) = collector.named("decode")
    assert 0 < decode.attributes["kvoy.new_tokens"] < 1000
    assert decode.end_ns == root.end_ns
    assert not any(b"secret" in body for body in collector.bodies)
