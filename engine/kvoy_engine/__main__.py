"""`kvoy serve`, `python -m kvoy_engine`: one engine, from flags to exit status.

The composition root: the only place of the engine that reads arguments and environment, handles
signals and sets up logging.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Final

import uvloop

from kvoy_contract.settings import read_settings
from kvoy_engine.config import EngineConfig
from kvoy_engine.loading import load_engine
from kvoy_engine.server import EngineServer, StartFailed

PROG: Final = "kvoy serve"
DESCRIPTION: Final = "Serve one model over the OpenAI API, with telemetry for Kvoy routers."
MAX_OPEN_FILES: Final = 65536

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    config = read_settings(EngineConfig, PROG, DESCRIPTION, argv)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    # Its lines at info repeat ours.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    raise_open_file_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(config))
    except StartFailed as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1


async def serve(config: EngineConfig) -> int:
    """Run one engine; SIGTERM and SIGINT drain it, a second one ends it at once."""
    server = EngineServer(config, lambda: load_engine(config, log_progress))
    event_loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        event_loop.add_signal_handler(number, server.request_drain)
    return await server.run()


def log_progress(text: str) -> None:
    logger.info("loading: %s", text)


def raise_open_file_limit() -> None:
    """Every connection is an open file, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
