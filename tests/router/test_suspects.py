"""Requests that kill engines, and come again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from kvoy_contract.errors import UpstreamFailed
from kvoy_contract.testing import FakeEngine, Fault, Script
from kvoy_router.app import Router
from kvoy_router.suspects import PAUSE_S, Suspects
from kvoy_router.testing import in_flight, running_router


def test_a_request_is_watched_and_then_refused_for_a_while_each_time() -> None:
    suspects = Suspects()
    now_s = 100.0

    assert suspects.check(b"x", now_s) == 0
    suspects.add(b"x", False, now_s)
    assert suspects.check(b"x", now_s) == 1, "once may be chance"
    for _ in range(3):
        suspects.add(b"x", True, now_s)
        with pytest.raises(UpstreamFailed) as refused:
            suspects.check(b"x", now_s + PAUSE_S - 1.0)
        assert (refused.value.code, refused.value.retry_after_s) == ("suspect", 1.0)
        now_s += PAUSE_S
        assert suspects.check(b"x", now_s) == 1
    assert suspects.check(b"y", now_s) == 0


def test_copies_of_one_request_that_fail_together_are_one_suspect() -> None:
    suspects = Suspects()
    for _ in range(5):
        suspects.add(b"x", False, 0.0)

    assert len(suspects) == 1
    assert suspects.check(b"x", 0.0) == 1


def test_what_does_no_more_harm_is_forgotten() -> None:
    suspects = Suspects()
    suspects.add(b"x", False, 0.0)

    assert suspects.check(b"x", 299.0) == 1
    assert suspects.check(b"x", 300.0) == 0
    assert len(suspects) == 0
    suspects.add(b"x", False, 330.0)
    assert suspects.check(b"x", 330.0) == 1, "it begins anew"


def test_their_number_is_bounded_and_the_latest_are_kept() -> None:
    suspects = Suspects()
    for number in range(5000):
        suspects.add(str(number).encode(), False, 0.0)

    assert len(suspects) == 1024
    assert suspects.check(b"4999", 0.0) == 1
    assert suspects.check(b"0", 0.0) == 0


async def test_a_client_that_sends_a_poison_again_kills_few_engines(
    start_engine: Callable[..., Awaitable[FakeEngine]],
) -> None:
    engines = [await start_engine() for _ in range(6)]
    for engine in engines:
        engine.script = Script(fault=Fault.RESET_BEFORE_HEAD)

    async with running_router(engines, breaker_failures=0, max_retries=5) as router:
        poison = {"model": "m", "messages": [{"role": "user", "content": "die"}]}
        asked = []
        for _ in range(5):
            answer = await ask(router, poison)
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "suspect"
            asked.append(sum(len(engine.requests) for engine in engines))
        assert asked == [2, 3, 3, 3, 3]
        assert int(answer.headers["retry-after"]) in range(1, int(PAUSE_S) + 1)

        for engine in engines:
            engine.script = Script()
        harmless = poison | {"messages": [{"role": "user", "content": "live"}]}
        assert (await ask(router, harmless)).status_code == 200
        assert in_flight(router) == [0] * 6


async def ask(router: Router, body: dict[str, Any]) -> httpx.Response:
    url = f"http://127.0.0.1:{router.server.port}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(url, json=body)
