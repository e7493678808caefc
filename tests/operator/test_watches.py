"""Which kinds are waited for before anything is watched, and how a watch that died is noticed."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from lightkube.config.kubeconfig import SingleConfig

from kvoy_operated.virtual_time import run_virtually
from kvoy_operator.api import Api
from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.kinds import CUSTOM, DEPLOYMENT, POD
from kvoy_operator.metrics import Metrics
from kvoy_operator.resync import Resync
from kvoy_operator.store import Store
from kvoy_operator.watch_health import DEAF_AFTER, STALLED_AFTER_S, WatchHealth
from kvoy_operator.watchdog import build_app
from kvoy_operator.watches import Watches


class _RefusingServer:
    """Knows all custom resources and refuses every third call."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    async def request(self, method: str, path: str) -> Any:
        if next(self._numbers) % 3 == 0:
            raise ApiRefusal(503, "ServiceUnavailable", "not now")
        return {"resources": [{"name": kind.plural} for kind in CUSTOM]}


async def _ignore(*_: Any) -> None:
    return None


def test_a_server_that_refuses_now_and_then_does_not_hold_the_start() -> None:
    async def find_kinds() -> None:
        watches = Watches(
            cast(Api, _RefusingServer()),
            cast(SingleConfig, None),
            [],
            WatchHealth(),
            lambda record: None,
            lambda ref, uid: None,
            _ignore,
        )
        async with asyncio.timeout(60):
            await watches._wait_for_custom_resources()

    run_virtually(find_kinds())


class _Listing:
    """An API server with one pod, which changes before each list and which no watch brings."""

    def __init__(self) -> None:
        self._version = 10

    async def raw(self, method: str, path: str, **_: Any) -> bytes:
        self._version += 1
        listing = {"metadata": {"resourceVersion": str(self._version)}, "items": [self._pod()]}
        return msgspec.json.encode(listing)

    async def request(self, method: str, path: str, **_: Any) -> Any:
        return self._pod()

    def _pod(self) -> dict[str, Any]:
        metadata = {"name": "p", "namespace": "team", "uid": "1"}
        return {
            "metadata": {**metadata, "resourceVersion": str(self._version)},
            "spec": {"containers": []},
            "status": {},
        }


async def _health_of(health: WatchHealth) -> tuple[int, str]:
    """What a kubelet is told."""
    app = build_app(Metrics(), health, is_ready=lambda: True)
    async with TestClient(TestServer(app)) as client:
        answer = await client.get("/healthz")
        return answer.status, await answer.text()


async def test_a_watch_that_is_answered_and_brings_nothing_makes_the_operator_unhealthy() -> None:
    health, store = WatchHealth(), Store()
    health.expect(POD, None)
    resync = Resync(
        cast(Api, _Listing()),
        store,
        (),
        lambda: [POD],
        store.put,
        store.remove,
        health.missed,
    )

    assert await resync.run_once(patience_s=0) == 1
    assert await _health_of(health) == (200, "ok\n")
    # It is answered all the time.
    health.saw_answer(POD.path(None), 200)
    assert await resync.run_once(patience_s=0) == 1

    assert await _health_of(health) == (503, "no sign of life from: Pod\n")


async def test_a_watch_that_was_only_late_is_healthy() -> None:
    health = WatchHealth()
    health.expect(POD, None)

    for _ in range(3):
        health.missed([POD])
        health.saw_event(POD, "team")

    assert await _health_of(health) == (200, "ok\n")


@pytest.mark.parametrize("is_followed_by_an_answer", [True, False])
async def test_a_watch_whose_task_hangs_makes_the_operator_unhealthy(
    is_followed_by_an_answer: bool,
) -> None:
    now_s = 100.0
    health = WatchHealth(lambda: now_s)
    for namespace in ("a", "b"):
        health.expect(DEPLOYMENT, namespace)

    now_s += STALLED_AFTER_S + 1
    # The other namespace's goes on, which tells nothing of this one.
    health.saw_answer(DEPLOYMENT.path("a"), 200)
    if is_followed_by_an_answer:
        health.saw_answer(DEPLOYMENT.path("b"), 200)

    status, told = await _health_of(health)
    assert status == (200 if is_followed_by_an_answer else 503)
    assert ("Deployment" in told) is not is_followed_by_an_answer


async def test_a_watch_that_begins_anew_is_not_blamed_for_the_one_before() -> None:
    health = WatchHealth()
    health.expect(POD, None)
    for _ in range(DEAF_AFTER):
        health.missed([POD])

    health.dismiss(POD, None)
    health.expect(POD, None)

    assert await _health_of(health) == (200, "ok\n")
