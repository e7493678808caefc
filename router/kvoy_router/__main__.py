"""`kvoy router`: reads the configuration, serves until a signal, drains, and says what went
wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

from prometheus_client import disable_created_metrics

from kvoy_contract import logs
from kvoy_contract.settings import Settings
from kvoy_contract.tracing import Tracing, TracingUnavailable, start_tracing
from kvoy_router import keys_command
from kvoy_router.app import Router
from kvoy_router.config import RouterConfig
from kvoy_router.errors import BadFile, NoClusterError
from kvoy_router.router_memory import return_large_blocks

log = logging.getLogger(__name__)

_COLLECT_EVERY = 5_000
"""New objects more than gone ones: young ones are looked through less than once a request."""
_SWITCH_S = 0.0005
"""After which a thread that encodes a long prompt lets the event loop go on: with the default of
5 ms, everybody's tokens would wait longer for it."""
_DESCRIPTION = (
    "One OpenAI endpoint in front of many engines: every request goes to the engine that already "
    "holds its work, has the memory and the shortest queue."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a router, or `kvoy router key ...`; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["key"]:
        return keys_command.main(arguments[1:])
    settings = Settings(RouterConfig, "kvoy router", _DESCRIPTION, arguments)
    config = settings.values
    logs.configure(config.log_level, config.log_format)
    # Calls to the Kubernetes API are no events of a router.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    # Else each counter has a second series beside it that nobody queries.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    _raise_file_limit(config.max_connections)
    return_large_blocks()
    try:
        tracing = start_tracing("kvoy-router", os.environ, time.monotonic)
    except TracingUnavailable as error:
        print(f"kvoy router: {error}", file=sys.stderr)
        return 1
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(settings, tracing))
    except NoClusterError as error:
        print(f"kvoy router: --kubernetes: {error}", file=sys.stderr)
        return 1
    except BadFile as error:
        print(f"kvoy router: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"kvoy router: {_explain(error, config)}", file=sys.stderr)
        return 1
    finally:
        if tracing is not None:
            tracing.close()
    return 0


async def _serve(settings: Settings[RouterConfig], tracing: Tracing | None) -> None:
    config = settings.values
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    router = Router(config, settings, _on_config, tracing)
    scheme = "http" if router.tls is None else "https"
    async with router.serving():
        log.info(
            "router listens",
            extra={
                "url": f"{scheme}://{config.host}:{router.server.port}/v1",
                "policy": config.policy,
                "router_id": router.pool.router_id,
            },
        )
        _spare_collections()
        sys.setswitchinterval(_SWITCH_S)
        await stop.wait()
        log.info("router drains", extra={"connections": router.server.num_connections})


def _on_config(config: RouterConfig) -> None:
    """What the whole process takes from a new configuration."""
    logging.getLogger().setLevel(config.log_level.upper())
    _raise_file_limit(config.max_connections)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: the byte path costs half there."""
    try:
        import uvloop
    except ImportError:
        return None
    loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return loop


def _spare_collections() -> None:
    """Modules and what else is there for good need not be looked through again: a full collection
    would hold up every stream for 20 ms. What requests leave behind is mostly not in cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 20, 20)


def _raise_file_limit(max_connections: int) -> None:
    """Ask for as many open files as the connections may need; less is served with less."""
    wanted = 2 * max_connections + 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _explain(error: OSError, config: RouterConfig) -> str:
    if error.errno == errno.EADDRINUSE:
        ports = f"{config.port}"
        if config.admin_port is not None:
            ports += f" or {config.admin_port}"
        return f"port {ports} on {config.host} is in use; choose another with --port"
    return f"cannot listen on {config.host}:{config.port}: {error.strerror or error}"


if __name__ == "__main__":
    sys.exit(main())
