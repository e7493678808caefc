"""Spans of requests, as a real OTLP receiver gets them from router and engines."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from kvoy_contract.testing import FakeEngine, Script
from kvoy_contract.testing_otlp import Collector, SeenSpan, collecting
from kvoy_contract.testing_ports import free_port
from kvoy_contract.testing_script import Fault
from kvoy_contract.tracing import ENDPOINT, Tracing, TracingUnavailable, start_tracing
from kvoy_engine.testing_server import running_engine, sim_config
from kvoy_router.app import Router
from kvoy_router.failover_testing import TOLD, bench
from kvoy_router.testing import SECRET, eventually, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a secret plan"}]}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
ROOT = "POST /v1/chat/completions"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        yield collector


@contextlib.contextmanager
def tracing_of(service: str) -> Iterator[Tracing]:
    """Whatever was recorded has been exported at the end."""
    tracing = start_tracing(service, os.environ, time.monotonic)
    assert tracing is not None
    yield tracing
    tracing.close()


async def ask(router: Router, body: Any = CHAT, **headers: str) -> httpx.Response:
    url = f"http://127.0.0.1:{router.server.port}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return await client.post("/v1/chat/completions", json=body, headers=named)


async def test_router_and_engine_tell_one_trace(collector: Collector) -> None:
    config = sim_config(secret=SECRET)
    body = CHAT | {"model": "sim", "max_tokens": 5, "stream": True}

    with tracing_of("kvoy-router") as of_router, tracing_of("kvoy-engine") as of_engine:
        async with (
            running_engine(config, tracing=of_engine) as engine,
            running_router(
                [engine],  # type: ignore[list-item] # has the same addresses
                tracing=of_router,
                policy="kv-aware",
            ) as router,
        ):
            # One that has not reported yet may be busy, which is another span: the wait for it.
            (endpoint,) = router.pool.endpoints
            await eventually(lambda: endpoint.load is not None)
            parent = f"00-{TRACE}-{PARENT}-01"
            answer = await ask(router, body, traceparent=parent, x_request_id="r-1")

    assert answer.status_code == 200
    assert {span.trace_id for span in collector.spans} == {TRACE}
    (root,) = collector.named(ROOT, "kvoy-router")
    (receive,) = collector.named("receive")
    (decide,) = collector.named("decide")
    (attempt,) = collector.named("attempt")
    (engines,) = collector.named(ROOT, "kvoy-engine")
    below = [collector.named(name, "kvoy-engine")[0] for name in ("queue", "prefill", "decode")]
    assert len(collector.spans) == 8
    assert (root.kind, root.parent_id) == ("server", PARENT)
    assert {receive.parent_id, decide.parent_id, attempt.parent_id} == {root.span_id}
    assert (attempt.kind, engines.kind) == ("client", "server")
    assert engines.parent_id == attempt.span_id
    assert {span.parent_id for span in below} == {engines.span_id}

    in_order = [root, receive, decide, attempt, engines, *below]
    assert all(span.start_ns <= span.end_ns for span in in_order)
    assert below[0].end_ns == below[1].start_ns
    assert below[1].end_ns == below[2].start_ns
    assert attempt.start_ns <= engines.start_ns <= below[0].start_ns
    assert root.end_ns >= attempt.end_ns
    assert abs(root.end_ns - time.time_ns()) < 60e9
    assert attempt.events == ("first byte",)

    usage = {"gen_ai.usage.output_tokens": 5, "gen_ai.usage.cache_read.input_tokens": 0}
    for span in (root, engines):
        assert usage.items() <= span.attributes.items()
        assert span.attributes["gen_ai.operation.name"] == "chat"
        assert span.attributes["gen_ai.request.model"] == "sim"
        assert span.attributes["gen_ai.request.stream"] is True
        assert span.attributes["http.request.method"] == "POST"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["kvoy.request.id"] == "r-1"
    assert decide.attributes["kvoy.policy"] == "kv-aware"
    assert decide.attributes["kvoy.cached_tokens.predicted"] == 0
    terms = ("wait", "prefill", "decode", "harm", "evict")
    costs = [decide.attributes[f"kvoy.cost.{term}_s"] for term in terms]
    assert decide.attributes["kvoy.cost.total_s"] == pytest.approx(sum(costs))
    assert not any(b"secret" in body for body in collector.bodies)


@pytest.mark.parametrize(
    ("given", "forwarded"),
    [
        ({"traceparent": f"00-{TRACE}-{PARENT}-00", "tracestate": "a=1"}, f"00-{TRACE}-"),
        ({}, "00-"),
    ],
    ids=["the sender's word", "the sampler's own"],
)
async def test_what_is_not_sampled_is_nowhere_recorded_and_the_engine_is_told_so(
    collector: Collector,
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    forwarded: str,
) -> None:
    if not given:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    engine = await start_engine()

    with tracing_of("kvoy-router") as tracing:
        async with running_router([engine], tracing=tracing) as router:
            assert (await ask(router, **given)).status_code == 200

    headers = engine.requests[0].headers
    assert headers["traceparent"].startswith(forwarded)
    assert int(headers["traceparent"].rpartition("-")[2], 16) & 1 == 0, "the flag of sampling"
    assert headers.get("tracestate") == given.get("tracestate")
    assert collector.spans == []


async def test_without_tracing_the_client_s_context_reaches_the_engine_as_it_is(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    parent = f"00-{TRACE}-{PARENT}-01"

    async with running_router([engine]) as router:
        answer = await ask(router, traceparent=parent, tracestate="a=1,b=2", x_request_id="my-id")

    headers = engine.requests[0].headers
    assert (headers["traceparent"], headers["tracestate"]) == (parent, "a=1,b=2")
    assert headers["x-request-id"] == answer.headers["x-request-id"] == "my-id"


async def test_every_attempt_is_a_span_and_failures_say_their_kind(
    collector: Collector, start_engine: StartEngine
) -> None:
    engines = [await start_engine() for _ in range(2)]
    for engine in engines:
        engine.scripts.append(Script(status=503, body=b"not now"))
    engines[0].scripts.append(Script())

    with tracing_of("kvoy-router") as tracing:
        async with running_router(engines, tracing=tracing) as router:
            answer = await ask(router)

    attempts = sorted(collector.named("attempt"), key=lambda span: span.start_ns)
    assert answer.status_code == 502
    assert [span.attributes["error.type"] for span in attempts] == ["status_503"] * 2
    assert all(span.is_error for span in attempts)
    (root,) = collector.named(ROOT)
    assert root.is_error
    assert root.attributes["kvoy.retries"] == 1
    assert root.attributes["http.response.status_code"] == 502
    assert [e.requests[0].headers["traceparent"].split("-")[2] for e in engines].count(
        attempts[0].span_id
    ) == 1


async def test_a_stream_that_goes_on_elsewhere_has_a_span_of_that_name(
    collector: Collector,
) -> None:
    config = sim_config(secret=SECRET, sim_base_s=0.1, enable_prefix_caching=False)
    # The first ids are far from all, also on a busy machine.
    body = CHAT | {"model": "sim", "max_tokens": 10, "seed": 5}
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(running_engine(config)) for _ in range(2)]
        with tracing_of("kvoy-router") as tracing:
            broken = await stack.enter_async_context(bench(engines, tracing=tracing))
            whole = await broken.ask(body)
            (await broken.ask(body, TOLD)).assert_equals(whole)
            await stack.aclose()

    (resume,) = collector.named("resume")
    first = next(span for span in collector.named("attempt") if span.is_error)
    assert resume.trace_id == first.trace_id
    assert resume.parent_id == first.parent_id
    assert resume.attributes["kvoy.resume.output_tokens"] > 0
    assert first.attributes["error.type"] == "connection_broken"
    assert not resume.is_error


async def test_what_waits_in_the_router_has_a_span_of_its_wait(
    collector: Collector, start_engine: StartEngine
) -> None:
    engine = await start_engine()

    with tracing_of("kvoy-router") as tracing:
        async with running_router([engine], tracing=tracing) as router:
            engine.report_load(running=1, queued_prefill_tokens=10_000_000)
            (endpoint,) = router.pool.endpoints
            await eventually(lambda: endpoint.load and endpoint.load.queued_prefill_tokens)
            asking = asyncio.create_task(ask(router))
            await eventually(lambda: router.gate.flow.num_waiting)
            engine.report_load(running=0, queued_prefill_tokens=0)
            assert (await asking).status_code == 200

    (queue,) = collector.named("queue")
    (root,) = collector.named(ROOT)
    assert queue.parent_id == root.span_id
    assert queue.end_ns > queue.start_ns


async def test_keys_and_bodies_are_in_no_span_also_when_a_request_is_refused(
    collector: Collector, start_engine: StartEngine
) -> None:
    engine = await start_engine()
    engine.script = Script(fault=Fault.NONE, status=400, body=json.dumps(REFUSAL).encode())

    with tracing_of("kvoy-router") as tracing:
        async with running_router([engine], tracing=tracing) as router:
            await ask(router, CHAT, authorization="Bearer secret-key")
            await ask(router, CHAT | {"secret": 1})

    assert len(collector.named(ROOT)) == 2
    assert not any(span.is_error for span in collector.named(ROOT)), "4xx is the client's"
    assert not any(b"secret" in body for body in collector.bodies)


REFUSAL = {"error": {"message": "secret plan", "type": "x", "param": None, "code": None}}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {ENDPOINT: ""},
        {ENDPOINT: "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {ENDPOINT: "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_no_spans_are_made_unless_they_are_asked_for(environ: dict[str, str]) -> None:
    assert start_tracing("kvoy", environ, time.monotonic) is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL: 'grpc' is not"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: 'zipkin' is neither"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(more: dict[str, str], words: str) -> None:
    with pytest.raises(TracingUnavailable, match=words):
        start_tracing("kvoy", {ENDPOINT: "http://127.0.0.1:9"} | more, time.monotonic)


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def bare(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", bare)

    with pytest.raises(TracingUnavailable, match=r"OTLP_ENDPOINT is set.*install kvoy\[tracing\]"):
        start_tracing("kvoy", {ENDPOINT: "http://127.0.0.1:9"}, time.monotonic)


@pytest.fixture
async def start_process(
    collector: Collector,
) -> AsyncIterator[Callable[..., Awaitable[asyncio.subprocess.Process]]]:
    processes: list[asyncio.subprocess.Process] = []

    async def start(*argv: str, **more: str) -> asyncio.subprocess.Process:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KVOY_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *argv),
            env=environ | {"KVOY_SECRET": SECRET} | more,
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.slow
async def test_processes_export_at_their_end_what_the_variables_ask_for(
    collector: Collector, start_process: Callable[..., Awaitable[asyncio.subprocess.Process]]
) -> None:
    engine_port, port = free_port((0, 1000)), free_port()
    serving = ("kvoy_engine", "sim", "--runner", "sim", "--port", str(engine_port))
    engine = await start_process(*serving, OTEL_BSP_SCHEDULE_DELAY="3600000")
    flags = ("--engine", f"127.0.0.1:{engine_port}", "--port", str(port))
    router = await start_process("kvoy_router", *flags, OTEL_SERVICE_NAME="edge")

    body = CHAT | {"model": "sim", "max_tokens": 3}
    async with httpx.AsyncClient(timeout=60) as client, asyncio.timeout(120):
        status = 0
        while status != 200:
            await asyncio.sleep(0.1)
            with contextlib.suppress(httpx.TransportError):
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                status = (await client.post(url, json=body)).status_code
    for process in (router, engine):
        process.terminate()
        _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()

    def of(service: str) -> dict[str, SeenSpan]:
        return {span.span_id: span for span in collector.spans if span.service == service}

    attempts = of("edge")
    (served,) = collector.named(ROOT, "kvoy-engine")
    assert attempts[served.parent_id].name == "attempt"


def test_without_the_variable_the_sdk_is_not_even_imported() -> None:
    code = (
        "import sys, kvoy_router.__main__, kvoy_engine.server, kvoy_contract.tracing as t;"
        "t.start_tracing('kvoy', {}, lambda: 0.0);"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()
