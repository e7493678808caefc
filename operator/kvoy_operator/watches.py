"""Keeps the watches running: waits for kinds to be served, restarts what ends, follows what is
installed later.

LeaderWorkerSets may be installed at any time and have a watch of their own, so that services
without groups are unaffected by whatever happens to them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from lightkube.config.kubeconfig import SingleConfig

from kvoy_operator.api import Api
from kvoy_operator.api_errors import ApiFailure, ApiRefusal
from kvoy_operator.handlers import OnGone, OnPut, Watch
from kvoy_operator.kinds import CUSTOM, OPTIONAL, WATCHED, Kind
from kvoy_operator.watch_health import WatchHealth

log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Between two looks for kinds that must be there."""
_DISCOVERY_S = 15.0
"""Between two looks for kinds that may come or go."""
_RESTART_S = 5.0


class Watches:
    def __init__(
        self,
        api: Api,
        config: SingleConfig,
        namespaces: Sequence[str],
        health: WatchHealth,
        on_put: OnPut,
        on_gone: OnGone,
        on_optional: Callable[[Kind, bool], Awaitable[None]],
    ) -> None:
        """`on_optional` is told when a kind of `OPTIONAL` is watched, and when it is no more."""
        self._api = api
        self._config = config
        self._namespaces = namespaces
        self._health = health
        self._on_put = on_put
        self._on_gone = on_gone
        self._on_optional = on_optional
        self._watched: set[Kind] = set()
        self._have_looked = asyncio.Event()
        self.is_ready = asyncio.Event()
        """All kinds are being watched, except optional ones that the cluster does not know."""

    def kinds(self) -> list[Kind]:
        """What is watched at present."""
        return sorted(self._watched)

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_required())
            for kind in OPTIONAL:
                group.create_task(self._keep_optional(kind))

    async def _keep_required(self) -> None:
        while True:
            await self._wait_for_custom_resources()
            await self._watch_until_end(WATCHED, self._announce_ready())
            # Ended by kopf: an error in a watch, or our kinds were deleted.
            await asyncio.sleep(_RESTART_S)

    async def _announce_ready(self) -> None:
        await self._have_looked.wait()
        self.is_ready.set()
        await asyncio.Event().wait()

    async def _keep_optional(self, kind: Kind) -> None:
        while True:
            while not (is_served := await self._is_served(kind)):
                if is_served is False:
                    self._have_looked.set()
                await asyncio.sleep(_LOOK_S if is_served is None else _DISCOVERY_S)
            await self._watch_until_end([kind], self._follow(kind))
            await self._on_optional(kind, False)
            await asyncio.sleep(_RESTART_S)

    async def _follow(self, kind: Kind) -> None:
        """Return when the cluster no longer knows `kind`."""
        self._have_looked.set()
        await self._on_optional(kind, True)
        is_served: bool | None = True
        while is_served is not False:
            await asyncio.sleep(_DISCOVERY_S)
            is_served = await self._is_served(kind)
        log.info("kind is no longer served", extra={"kind": kind.name})

    async def _watch_until_end(
        self, kinds: Sequence[Kind], alongside: Coroutine[Any, Any, None]
    ) -> None:
        """Watch until kopf ends by itself, or `alongside` returns."""
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        watch = Watch(
            kinds,
            self._namespaces,
            self._config,
            self._health,
            self._on_put,
            self._on_gone,
            lambda error: None if ended.done() else ended.set_result(error),
        )
        watch.start()
        self._watched.update(kinds)
        beside = asyncio.create_task(alongside)
        try:
            both: list[asyncio.Future[Any]] = [ended, beside]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                log.warning("watch ended; starts again", extra={"error": repr(ended.result())})
            else:
                beside.result()
        finally:
            beside.cancel()
            self._watched.difference_update(kinds)
            await watch.stop()

    async def _wait_for_custom_resources(self) -> None:
        is_reported = False
        missing: Sequence[Kind] = CUSTOM
        # Found once is enough: a server that refuses now and then need not answer all in a row.
        while missing := [kind for kind in missing if not await self._is_served(kind)]:
            if not is_reported:
                is_reported = True
                names = ",".join(kind.plural for kind in missing)
                log.warning("waits for custom resources", extra={"missing": names})
            await asyncio.sleep(_LOOK_S)

    async def _is_served(self, kind: Kind) -> bool | None:
        """Whether the cluster knows `kind`; None: it does not say."""
        try:
            found = await self._api.request("GET", f"/apis/{kind.group}/{kind.version}")
        except ApiRefusal as error:
            return False if error.is_not_found else None
        except ApiFailure:
            return None
        return any(resource["name"] == kind.plural for resource in found.get("resources") or ())
