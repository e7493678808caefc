"""`kvoy serve`, `python -m kvoy_engine`: one engine, from flags to exit status.

The composition root: the only place of the engine that reads arguments and environment, handles
signals and sets up logging.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Final

import uvloop

from kvoy_contract import logs
from kvoy_contract.settings import BadSetting, read_settings
from kvoy_contract.tracing import Tracing, TracingUnavailable, start_tracing
from kvoy_engine import home, last_words
from kvoy_engine.config import EngineConfig
from kvoy_engine.group_worker import GroupWorker
from kvoy_engine.http_server import StartFailed
from kvoy_engine.loading import load_engine, load_in_group
from kvoy_engine.server import EngineServer, LoadedEngine

PROG: Final = "kvoy serve"
DESCRIPTION: Final = "Serve one model over the OpenAI API, with telemetry for Kvoy routers."
GROUP_VARIABLES: Final = {
    "KVOY_NNODES": "LWS_GROUP_SIZE",
    "KVOY_NODE_RANK": "LWS_WORKER_INDEX",
    "KVOY_MASTER_ADDR": "LWS_LEADER_ADDRESS",
}
MAX_OPEN_FILES: Final = 65536
PROGRESS_LOG_S: Final = 1.0

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    # Until the event loop takes over: as process 1 of a container it would get no signal at all.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    take_group_variables(os.environ)
    folders = home.provide_folders(os.environ)
    try:
        config = read_settings(EngineConfig, PROG, DESCRIPTION, argv)
    except BadSetting as error:
        last_words.leave(StartFailed.reason, error.reason, os.environ)
        raise
    logs.configure(config.log_level, config.log_format)
    if folders:
        logger.info("usual folders cannot be written, these are used", extra=folders)
    # Its lines at info repeat ours.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    raise_open_file_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(config))
    except StartFailed as error:
        last_words.leave(error.reason, str(error), os.environ)
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1


async def serve(config: EngineConfig) -> int:
    """Run one engine; SIGTERM and SIGINT drain it, a second one ends it at once.

    Raises StartFailed.
    """
    tracing = None
    if not config.is_worker:
        try:
            tracing = start_tracing("kvoy-engine", os.environ, time.monotonic)
        except TracingUnavailable as error:
            raise StartFailed(str(error)) from None
    server = GroupWorker(config) if config.is_worker else _engine(config, tracing)
    event_loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        event_loop.add_signal_handler(number, server.request_drain)
    try:
        return await server.run()
    finally:
        if tracing is not None:
            tracing.close()


def _engine(config: EngineConfig, tracing: Tracing | None) -> EngineServer:
    async def load() -> LoadedEngine:
        if config.nnodes > 1:
            return await load_in_group(config, ProgressLog(), server.begin_drain)
        return await load_engine(config, ProgressLog())

    server = EngineServer(config, load, tracing=tracing)
    return server


def take_group_variables(environment: MutableMapping[str, str]) -> None:
    """What a LeaderWorkerSet injects stands for our own variables where these are not set."""
    for name, injected in GROUP_VARIABLES.items():
        if injected in environment:
            environment.setdefault(name, environment[injected])


class ProgressLog:
    """Logs what is loading; of steps that follow each other fast (`weights: layer 7 of 30`), one
    a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kind = ""
        self._logged_s = -math.inf

    def __call__(self, text: str) -> None:
        kind, now_s = text.partition(":")[0], self._clock()
        if kind == self._kind and now_s < self._logged_s + PROGRESS_LOG_S:
            return
        self._kind, self._logged_s = kind, now_s
        logger.info("loading: %s", text)


def raise_open_file_limit() -> None:
    """Every connection is an open file, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
