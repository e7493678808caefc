"""The HTTP socket of an engine process, and the server on it. Knows no route."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import uvicorn

from kvoy_engine.asgi import Receive, Scope, Send
from kvoy_engine.config import EngineConfig
from kvoy_engine.http_protocol import protocol_with_deadline

BACKLOG: Final = 2048
STOP_TIMEOUT_S: Final = 5

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class StartFailed(Exception):
    """The engine cannot serve; the message is one line for people."""

    reason = "StartFailed"
    """For programs: what the last words of a pod begin with."""


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket; port 0 takes a free one. Raises StartFailed."""
    with new_socket(host) as listener:
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            raise StartFailed(f"cannot listen on {host}:{port}: {error.strerror}") from None
        yield listener


def new_socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def create_http(app: App, config: EngineConfig) -> uvicorn.Server:
    """A server that logs no requests (probes would fill the log) and leaves signals alone."""
    return _QuietServer(
        uvicorn.Config(
            app,
            http=protocol_with_deadline(config.request_read_timeout_s),
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            lifespan="off",
            loop="none",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(config.keep_alive_s),
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
    )


class _QuietServer(uvicorn.Server):
    """Leaves signals to whoever composed the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
