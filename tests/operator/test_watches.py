"""Which kinds are waited for before anything is watched."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

from lightkube.config.kubeconfig import SingleConfig

from kvoy_operated.virtual_time import run_virtually
from kvoy_operator.api import Api
from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.kinds import CUSTOM
from kvoy_operator.watch_health import WatchHealth
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
