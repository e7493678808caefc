"""The engines as discovery finds them: each is in the pool and has one telemetry client running."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvoy_router.found import FoundEngine
from kvoy_router.pool import Pool
from kvoy_router.prompts import Prompts

log = logging.getLogger(__name__)


class Fleet:
    """`apply` is the only writer of the pool's endpoints; `run` owns the telemetry tasks."""

    def __init__(
        self,
        pool: Pool,
        prompts: Prompts,
        watch: Callable[[FoundEngine], asyncio.Task[None]],
        on_removed: Callable[[str], None],
    ) -> None:
        """`watch` starts an engine's telemetry task; `on_removed` hears the names of those that
        are gone."""
        self._pool = pool
        self._prompts = prompts
        self._watch = watch
        self._on_removed = on_removed
        self._tasks: dict[FoundEngine, asyncio.Task[None]] = {}

    def apply(self, engines: Sequence[FoundEngine]) -> None:
        """Make the pool hold exactly these engines. One that has changed in anything but draining,
        such as another pod at the same address, is taken out and in again."""
        wanted = {replace(engine, is_draining=False): engine for engine in engines}
        for engine in self._tasks.keys() - wanted.keys():
            self._remove(engine)
        for engine, as_found in wanted.items():
            if engine not in self._tasks:
                self._add(engine)
            self._pool.set_draining(engine.address.http, as_found.is_draining)
        infos = [endpoint.info for endpoint in self._pool.endpoints]
        if all(info is not None for info in infos):
            self._prompts.keep_only({info.tokenizer_digest for info in infos if info is not None})

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    def _add(self, engine: FoundEngine) -> None:
        address = engine.address
        endpoint = self._pool.add_endpoint(address.http, address.telemetry, engine.origin)
        self._tasks[engine] = self._watch(engine)
        log.info("engine added", extra={"engine": endpoint.name, "address": address.http})

    def _remove(self, engine: FoundEngine) -> None:
        self._tasks.pop(engine).cancel()
        endpoint_id = engine.address.http
        name = engine.origin.pod or endpoint_id
        self._pool.remove_endpoint(endpoint_id)
        self._on_removed(name)
        log.info("engine removed", extra={"engine": name, "address": endpoint_id})
