"""A stream whose first byte is late is asked of a second engine too, where that is wanted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest

from kvoy_contract.testing import FakeEngine, Script
from kvoy_contract.testing_script import Fault
from kvoy_router.app import Router
from kvoy_router.config import RouterConfig
from kvoy_router.decision import Decision
from kvoy_router.hedging import LEAST, WINDOW, HedgeMode, HedgeOptions, Hedging
from kvoy_router.testing import eventually, in_flight, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]

STREAM: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
}
FIXED: dict[str, Any] = {"hedge": "fixed", "hedge_after_s": 0.05}
NEVER_S = 3600.0


class Predicted:
    """As much of a decision as hedging looks at."""

    def __init__(self, predicted_ttft_s: float | None = None, model: str = "m") -> None:
        self.model = model
        self.now_s = 100.0
        self.predicted_ttft_s = predicted_ttft_s


def decision(predicted_ttft_s: float | None = None) -> Decision:
    return cast(Decision, Predicted(predicted_ttft_s))


def hedging(mode: HedgeMode, after_s: float = 0.1) -> Hedging:
    return Hedging(HedgeOptions(mode, after_s))


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert RouterConfig(engine=("127.0.0.1:9",)).hedge == "off"
    assert hedging(HedgeMode.OFF).delay_s(decision(0.1)) is None


def test_a_fixed_delay_is_that_delay() -> None:
    assert hedging(HedgeMode.FIXED, 0.7).delay_s(decision(5.0)) == 0.7


def test_an_observed_delay_is_the_prediction_and_the_usual_lateness() -> None:
    observed = hedging(HedgeMode.OBSERVED)
    # Predicted were 2 s; the i-th of 100 came i hundredths of a second later.
    lates = [i / 100 for i in range(100)]
    random.Random(1).shuffle(lates)
    for late_s in lates[: LEAST - 1]:
        observed.note(decision(2.0), 102.0 + late_s)
    assert observed.delay_s(decision(2.0)) is None, "too few to speak of a percentile"

    for late_s in lates[LEAST - 1 :] * 3:
        observed.note(decision(2.0), 102.0 + late_s)

    for predicted_s in (None, 0.5, 30.0):
        expected = (predicted_s or 0.0) + 0.95
        assert observed.delay_s(decision(predicted_s)) == pytest.approx(expected, abs=0.05)


def test_an_observed_delay_is_never_below_the_least_and_follows_the_latest_streams() -> None:
    observed = hedging(HedgeMode.OBSERVED, after_s=0.3)
    for _ in range(WINDOW):
        observed.note(decision(), 100.01)
    assert observed.delay_s(decision()) == 0.3

    for _ in range(WINDOW):
        observed.note(decision(), 104.0)
    assert observed.delay_s(decision()) == pytest.approx(4.0)


async def ask(router: Router, body: Any = STREAM) -> httpx.Response:
    url = f"http://127.0.0.1:{router.server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return await client.post("/v1/chat/completions", json=body)


def hedges(router: Router) -> tuple[float, float]:
    read = router.metrics.registry.get_sample_value
    first, second = (
        read("kvoy_router_hedges_total", {"model": "m", "answered": each}) or 0.0
        for each in ("first", "second")
    )
    return first, second


async def two_engines(start_engine: StartEngine) -> tuple[FakeEngine, FakeEngine]:
    return await start_engine(), await start_engine()


def late_first(engines: tuple[FakeEngine, FakeEngine], late: Script, other: Script) -> None:
    """Whichever is asked first gets `late`: the scripts of both wait for the first request."""
    for engine in engines:
        engine.script = other
        engine.scripts.clear()
    engines[0].scripts.append(late)


async def first_asked(router: Router, engines: tuple[FakeEngine, FakeEngine]) -> None:
    """From here on round-robin asks `engines[0]` next, and no hedge has been made until then: on a
    busy machine any answer may be late."""
    options = router.proxy.options
    router.proxy.use_options(replace(options, hedge=HedgeOptions(HedgeMode.OFF)))
    while True:
        await ask(router)
        last = max(router.pool.endpoints, key=lambda endpoint: endpoint.last_pick)
        if engines[0].requests and last.address == engines[1].address:
            break
    router.proxy.use_options(options)
    for engine in engines:
        engine.requests.clear()


async def test_the_second_engine_answers_and_the_first_is_let_go(
    start_engine: StartEngine,
) -> None:
    engines = await two_engines(start_engine)

    async with running_router(engines, **FIXED) as router:
        await first_asked(router, engines)
        late_first(engines, Script(delay_s=NEVER_S), Script(pieces=("fast",)))
        budget = router._budgets[0].tokens
        answer = await ask(router)

        await eventually(lambda: engines[0].num_aborted == 1)
        assert answer.status_code == 200
        assert answer.text.count("fast") == 1
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.headers["x-kvoy-engine"] == engines[1].address
        assert hedges(router) == (0, 1)
        assert in_flight(router) == [0, 0]
        assert router._budgets[0].tokens < budget, "a hedge is paid like a retry"
        first, second = (engine.requests[0].envelope for engine in engines)
        assert first is not None
        assert second is not None
        assert (first.seed, first.token_ids) == (second.seed, second.token_ids)


async def test_the_first_engine_may_still_answer_first(start_engine: StartEngine) -> None:
    engines = await two_engines(start_engine)

    async with running_router(engines, **FIXED) as router:
        await first_asked(router, engines)
        gate = asyncio.Event()
        late_first(engines, Script(gate=gate, pieces=("slow",)), Script(delay_s=NEVER_S))
        asking = asyncio.create_task(ask(router))
        await eventually(lambda: engines[1].in_flight == 1)
        gate.set()
        answer = await asking

        await eventually(lambda: engines[1].num_aborted == 1)
        assert "slow" in answer.text
        assert answer.headers["x-kvoy-engine"] == engines[0].address
        assert hedges(router) == (1, 0)
        assert in_flight(router) == [0, 0]


@pytest.mark.parametrize(
    ("settings", "body"),
    [
        ({"hedge": "fixed", "hedge_after_s": 20.0}, STREAM),
        (FIXED | {"retry_burst": 0, "retry_share": 0.0}, STREAM),
        (FIXED, STREAM | {"stream": False}),
        ({}, STREAM),
        ({"hedge": "observed", "hedge_after_s": 0.05}, STREAM),
    ],
    ids=["in time", "no budget", "a whole answer", "off", "nothing observed yet"],
)
async def test_a_second_engine_is_asked_only_for_a_late_stream_within_the_budget(
    start_engine: StartEngine, settings: dict[str, Any], body: dict[str, Any]
) -> None:
    engines = await two_engines(start_engine)
    for engine in engines:
        engine.script = Script(delay_s=0.3)

    async with running_router(engines, **settings) as router:
        answer = await ask(router, body)

        assert answer.status_code == 200
        assert sum(len(engine.requests) for engine in engines) == 1
        assert hedges(router) == (0, 0)
        assert in_flight(router) == [0, 0]


async def test_with_one_engine_there_is_nobody_to_ask(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.script = Script(delay_s=0.3)

    async with running_router([engine], **FIXED) as router:
        budget = router._budgets[0].tokens
        assert (await ask(router)).status_code == 200

        assert len(engine.requests) == 1
        assert router._budgets[0].tokens >= budget


@pytest.mark.parametrize("broken", [0, 1])
async def test_one_of_them_may_fail(start_engine: StartEngine, broken: int) -> None:
    engines = await two_engines(start_engine)

    async with running_router(engines, **FIXED) as router:
        await first_asked(router, engines)
        gates = asyncio.Event(), asyncio.Event()
        failing = Script(status=503, body=b"{}")
        scripts = [Script(gate=gate, pieces=("good",)) for gate in gates]
        scripts[broken] = Script(gate=gates[broken], status=503, body=failing.body)
        for engine, script in zip(engines, scripts, strict=True):
            engine.scripts.append(script)
        asking = asyncio.create_task(ask(router))
        await eventually(lambda: engines[1].in_flight == 1)
        gates[broken].set()
        await eventually(lambda: in_flight(router)[broken] == 0)
        gates[1 - broken].set()
        answer = await asking

        assert answer.status_code == 200
        assert "good" in answer.text
        assert [len(engine.requests) for engine in engines] == [1, 1]
        assert in_flight(router) == [0, 0]


async def test_a_request_that_kills_both_is_suspect(start_engine: StartEngine) -> None:
    engines = [await start_engine() for _ in range(4)]
    gate = asyncio.Event()
    for engine in engines:
        engine.script = Script(gate=gate, fault=Fault.RESET_BEFORE_HEAD)

    async with running_router(engines, **FIXED, breaker_failures=0) as router:
        asking = asyncio.create_task(ask(router))
        await eventually(lambda: sum(engine.in_flight for engine in engines) == 2)
        gate.set()
        answer = await asking

        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "suspect"
        assert sum(len(engine.requests) for engine in engines) == 2
        assert in_flight(router) == [0] * 4


async def test_a_client_that_goes_ends_both(start_engine: StartEngine) -> None:
    engines = await two_engines(start_engine)
    for engine in engines:
        engine.script = Script(delay_s=NEVER_S)

    async with running_router(engines, **FIXED) as router:
        asking = asyncio.create_task(ask(router))
        await eventually(lambda: all(engine.in_flight == 1 for engine in engines))
        asking.cancel()

        await eventually(lambda: all(engine.num_aborted == 1 for engine in engines))
        await eventually(lambda: in_flight(router) == [0, 0])
        assert router.metrics.in_flight == 0


async def test_whatever_the_engines_do_every_request_ends_and_every_lease_returns(
    start_engine: StartEngine,
) -> None:
    engines = [await start_engine() for _ in range(3)]
    draw = random.Random(7)
    for engine in engines:
        for _ in range(120):
            fault = draw.choice((Fault.NONE, Fault.NONE, Fault.NONE, *Fault.__members__.values()))
            fault = Fault.NONE if fault in (Fault.HANG, Fault.HANG_BEFORE_HEAD) else fault
            engine.scripts.append(
                Script(
                    delay_s=draw.choice((0.0, 0.0, 0.002, 0.02)),
                    status=draw.choice((200, 200, 200, 503)),
                    fault=fault,
                    fault_after=draw.choice((0, 1)),
                )
            )

    settings: dict[str, Any] = {"hedge": "fixed", "hedge_after_s": 0.002, "breaker_failures": 0}
    async with running_router(engines, **settings) as router:
        answers = await asyncio.gather(*(ask(router) for _ in range(120)))

        assert {answer.status_code for answer in answers} <= {200, 502, 503, 504}
        assert sum(hedges(router)) > 0
        await eventually(lambda: in_flight(router) == [0, 0, 0])
        assert router.gate.flow.num_waiting == 0
        assert router.resume_memory.used_bytes == 0
        for endpoint in router.pool.endpoints:
            endpoint.ledger.check_integrity()
