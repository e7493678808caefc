"""The router's HTTP/1.1 listener: limits, the sweep of overdue connections, draining.

One sweep a fraction of a second apart serves all connections, so that ten thousand idle ones cost
no timers. Memory that clients can make the server hold is bounded: connections, bytes of a head,
bytes of one body, and of all requests together (`body_memory`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

from kvoy_contract.errors import ApiError
from kvoy_router.body_memory import BodyMemory, Budget
from kvoy_router.http_connection import ServerConnection
from kvoy_router.http_message import Headers, Request
from kvoy_router.http_response import Response

Handler = Callable[[Request, Response], Awaitable[None]]

_BACKLOG = 4096
_MEMORY_BYTES = 512 * 1024 * 1024
"""For requests, unless told."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client may cost."""

    max_connections: int = 16_384
    max_head_bytes: int = 32 * 1024
    max_body_bytes: int = 32 * 1024 * 1024
    head_s: float = 10.0
    """From a request's first byte to the end of its head."""
    body_s: float = 30.0
    """For a body, besides one second for every `min_body_bytes_per_s` that came."""
    min_body_bytes_per_s: float = 16 * 1024
    memory_wait_s: float = 10.0
    """Until there is room for a large body."""
    keep_alive_s: float = 75.0
    """An idle connection is kept so long; longer than the usual client's pool keeps it."""
    send_stall_s: float = 60.0
    """A client that reads nothing for so long, while there is something to read, is dropped."""
    linger_s: float = 2.0
    drain_idle_s: float = 2.0
    """A draining server keeps idle connections so long: a client may be sending on one already, and
    is then answered, with the word that this connection ends."""
    sweep_s: float = 0.5

    @property
    def large_body_s(self) -> float:
        """As `body_s`, for a body that has a place in memory which others may wait for: half of
        what they wait, so that who begins to wait when a sender stops gets its place."""
        return min(self.body_s, self.memory_wait_s / 2)

    def time_s(self, is_receiving: bool, waits_for_memory: bool) -> float:
        """For a client that is owed no answer, until it is overdue."""
        if waits_for_memory:
            return self.memory_wait_s
        return self.body_s if is_receiving else self.keep_alive_s


class HttpServer:
    """Listens, and owns all connections. `handler` answers each request; it is cancelled when the
    client goes."""

    def __init__(
        self,
        handler: Handler,
        limits: HttpLimits,
        on_refused: Callable[[ApiError], None] = lambda error: None,
        memory: BodyMemory | None = None,
        check_sender: Callable[[Headers], None] = lambda headers: None,
    ) -> None:
        """`on_refused` hears of requests that never reached the handler; `memory` is shared with
        other servers; `check_sender` raises an ApiError for headers whose large body is not to get
        any memory."""
        self.handler = handler
        self.limits = limits
        self.on_refused = on_refused
        self.check_sender = check_sender
        self.is_draining = False
        self.date = b""
        self.memory = memory or BodyMemory(Budget(_MEMORY_BYTES, _MEMORY_BYTES))
        self._connections: set[ServerConnection] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def port(self) -> int:
        assert self._server is not None, "not listening"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def now_s(self) -> float:
        return self._loop.time()

    async def listen(self, host: str, port: int, **options: Any) -> None:
        """Raises OSError when the address cannot be bound."""
        self._sweep()
        self._server = await self._loop.create_server(
            lambda: ServerConnection(self), host, port, backlog=_BACKLOG, **options
        )

    def add(self, connection: ServerConnection) -> bool:
        """Register a connection; False when there are too many (it is registered all the same,
        until it has been told so)."""
        self._connections.add(connection)
        self._empty.clear()
        return len(self._connections) <= self.limits.max_connections

    def discard(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def release(self, request: Request, num_bytes: int = 0) -> None:
        """Nothing is held of this request any more, nor `num_bytes` besides."""
        if request.claim is None:
            num_bytes += len(request.body) + request.extra_bytes
        else:
            request.claim.end()
        self.memory.give_back(num_bytes)

    async def drain(self, timeout_s: float) -> bool:
        """Accept no more, let requests end, then cut what is left. True if nothing was cut."""
        self.is_draining = True
        if self._server is not None:
            self._server.close()
        idle_s = min(self.limits.drain_idle_s, timeout_s / 2)
        is_clean = await self._is_empty_within(idle_s)
        if not is_clean:
            for connection in list(self._connections):
                connection.close_if_idle()
            is_clean = await self._is_empty_within(timeout_s - idle_s)
        if not is_clean:
            for connection in list(self._connections):
                connection.abort()
            async with asyncio.timeout(1.0):
                await self._empty.wait()
        if self._sweeper is not None:
            self._sweeper.cancel()
        return is_clean

    async def _is_empty_within(self, timeout_s: float) -> bool:
        """Whether the last connection ends in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _sweep(self) -> None:
        self.date = formatdate(time.time(), usegmt=True).encode()
        now_s = self._loop.time()
        overdue = [connection for connection in self._connections if connection.deadline < now_s]
        for connection in overdue:
            # The end of one may be what another has waited for.
            if connection.deadline < now_s:
                connection.overdue()
        self._sweeper = self._loop.call_later(self.limits.sweep_s, self._sweep)
