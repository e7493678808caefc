"""The engines as discovery lists them: each is in the pool and has one telemetry client running."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvoy_router.config import EngineAddress
from kvoy_router.pool import Pool
from kvoy_router.prompts import Prompts

log = logging.getLogger(__name__)


class Fleet:
    """`apply` is the only writer of the pool's endpoints; `run` owns the telemetry tasks."""

    def __init__(
        self,
        pool: Pool,
        prompts: Prompts,
        watch: Callable[[EngineAddress], asyncio.Task[None]],
        on_removed: Callable[[str], None],
    ) -> None:
        """`watch` starts an engine's telemetry task; `on_removed` hears of ids that are gone."""
        self._pool = pool
        self._prompts = prompts
        self._watch = watch
        self._on_removed = on_removed
        self._tasks: dict[EngineAddress, asyncio.Task[None]] = {}

    def apply(self, engines: Sequence[EngineAddress]) -> None:
        """Make the pool hold exactly these engines. One whose telemetry address has changed is
        taken out and in again."""
        wanted = set(engines)
        for engine in self._tasks.keys() - wanted:
            self._tasks.pop(engine).cancel()
            self._pool.remove_endpoint(engine.http)
            self._on_removed(engine.http)
            log.info("engine removed", extra={"engine": engine.http})
        for engine in engines:
            if engine not in self._tasks:
                self._pool.add_endpoint(engine.http, engine.telemetry)
                self._tasks[engine] = self._watch(engine)
                log.info("engine added", extra={"engine": engine.http})
        infos = [endpoint.info for endpoint in self._pool.endpoints]
        if all(info is not None for info in infos):
            self._prompts.keep_only({info.tokenizer_digest for info in infos if info is not None})

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
