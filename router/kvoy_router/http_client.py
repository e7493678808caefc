"""HTTP/1.1 connections to engines: pooled, each with one exchange at a time, bodies pushed to a
sink.

No task wakes up for what is read: it is pushed, see `upstream_connection`. A slow sink pauses
reading, which stops the engine through TCP. Leaving an exchange before its end closes the
connection, and that is how a request is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvoy_router.errors import (
    BadResponse,
    ConnectFailed,
    ConnectionBroken,
    FirstByteTimeout,
    IdleTimeout,
)
from kvoy_router.http_message import Headers, encode_request_head
from kvoy_router.time_limit import TimeLimit
from kvoy_router.upstream_connection import ShortCut, UpstreamConnection

_LOOK_S = 0.25
"""How exactly one knows when something came last."""
_ON_ITS_WAY_S = 0.5
"""A request that is lost with a closed connection is known to be after a round trip."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    connect_s: float = 2.0
    first_byte_s: float = 300.0
    """Of a stream: queueing and prefill happen before it."""
    whole_answer_s: float = 600.0
    """The first byte of an answer that is not streamed: all its tokens are made before it."""
    idle_s: float = 60.0
    """Between bytes of an answer."""
    keep_alive_s: float = 4.0
    """An unused connection is dropped after so long: below the 5 s that servers commonly keep
    one."""
    max_idle_per_engine: int = 128


class Exchange:
    """One request and its answer; a context manager that gives back or closes the connection."""

    def __init__(
        self, pool: ClientPool, address: str, connection: UpstreamConnection, idle_s: float
    ) -> None:
        self._pool = pool
        self._idle_s = idle_s
        self._address = address
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        """Until when nothing may come."""

    @property
    def status(self) -> int:
        return self.connection.status

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.connection.headers:
            if key == name:
                return value
        return None

    @property
    def media_type(self) -> bytes:
        return (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()

    async def relay(self, sink: Callable[[bytes], None], short_cut: ShortCut | None = None) -> None:
        """Push the body into `sink` (see `UpstreamConnection.attach`); return at its end.

        Raises ConnectionBroken, BadResponse, or IdleTimeout when nothing came for `idle_s` although
        it could have.
        """
        connection = self.connection
        connection.attach(sink, short_cut)
        try:
            if not connection.done.done():
                self._check_idle()
            await connection.done
        finally:
            if self._watch is not None:
                self._watch.cancel()
                # What a request leaves in a cycle stays until the collector comes, which it does
                # the more seldom the more streams there are.
                self._watch = None

    def _check_idle(self) -> None:
        connection = self.connection
        connection.look()
        now_s = self._loop.time()
        quiet_s = 0.0 if connection.is_reading_paused else now_s - connection.last_data_s
        if quiet_s >= self._idle_s:
            connection.fail(IdleTimeout(f"nothing came for {self._idle_s:g} s"))
        else:
            self._watch = self._loop.call_later(self._idle_s - quiet_s, self._check_idle)

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises as `relay` does, and BadResponse beyond `max_bytes`."""
        parts: list[bytes] = []
        size = 0

        def collect(data: bytes) -> None:
            nonlocal size
            size += len(data)
            parts.append(data)
            if size > max_bytes:
                self.connection.fail(BadResponse(f"its answer is larger than {max_bytes} bytes"))

        await self.relay(collect)
        return b"".join(parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.give_back(self._address, self.connection)


class ClientPool:
    """Idle connections by engine address. Bounded per engine, and in time by `keep_alive_s`."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        """May be replaced; requests keep those that they were sent under."""
        self._idle: dict[str, list[UpstreamConnection]] = {}
        self._busy: dict[str, set[UpstreamConnection]] = {}
        self._loop = asyncio.get_running_loop()
        self._looking: asyncio.TimerHandle | None = None

    @property
    def num_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    async def request(
        self,
        address: str,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: bytes = b"",
        *,
        prefix: bytes = b"",
        is_stream: bool = False,
    ) -> Exchange:
        """Send a request, whose body begins with `prefix`, and wait for the answer's head.

        A kept connection that the engine closes at once, before any byte of the answer, was most
        likely closed while the request was on its way; it is sent once more, on a new connection.
        Where there can be none the engine has died, and of this request for all that is known.

        Raises ConnectFailed, ConnectionBroken, FirstByteTimeout, BadResponse.
        """
        lines = [(b"host", address.encode()), *headers]
        if body or method == b"POST":
            lines.append((b"content-length", b"%d" % (len(prefix) + len(body))))
        parts = (encode_request_head(method, target, lines), prefix, body)
        limits = self.limits
        limit_s = limits.first_byte_s if is_stream else limits.whole_answer_s
        kept = self._take(address)
        if kept is None:
            fresh = await self._connect(address)
            return await self._exchange(address, fresh, parts, limit_s, limits.idle_s)
        try:
            return await self._exchange(address, kept, parts, limit_s, limits.idle_s)
        except ConnectionBroken as broken:
            if kept.num_bytes or self._loop.time() - kept.begun_s > _ON_ITS_WAY_S:
                raise
            try:
                fresh = await self._connect(address)
            except ConnectFailed:
                raise broken from None
        return await self._exchange(address, fresh, parts, limit_s, limits.idle_s)

    async def _exchange(
        self,
        address: str,
        connection: UpstreamConnection,
        parts: tuple[bytes, ...],
        limit_s: float,
        idle_s: float,
    ) -> Exchange:
        self._busy.setdefault(address, set()).add(connection)
        if self._looking is None:
            self._looking = self._loop.call_later(_LOOK_S, self._look)
        try:
            with TimeLimit(limit_s):
                await connection.write(parts)
                await connection.head
        except BaseException as error:
            self._forget_busy(address, connection)
            connection.close()
            if isinstance(error, TimeoutError):
                raise FirstByteTimeout(f"no answer within {limit_s:g} s") from None
            raise
        return Exchange(self, address, connection, idle_s)

    async def _connect(self, address: str) -> UpstreamConnection:
        host, _, port = address.rpartition(":")
        try:
            with TimeLimit(self.limits.connect_s):
                _, connection = await self._loop.create_connection(
                    UpstreamConnection, host.strip("[]"), int(port)
                )
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self.limits.connect_s:g} s") from None
        except OSError as error:
            raise ConnectFailed(error.strerror or str(error)) from None
        return connection

    def _take(self, address: str) -> UpstreamConnection | None:
        idle = self._idle.get(address, [])
        oldest_s = self._loop.time() - self.limits.keep_alive_s
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since_s > oldest_s:
                connection.begin()
                return connection
            connection.close()
        return None

    def give_back(self, address: str, connection: UpstreamConnection) -> None:
        """Keep the connection of a finished exchange, or close that of any other."""
        self._forget_busy(address, connection)
        idle = self._idle.setdefault(address, [])
        if connection.is_reusable and len(idle) < self.limits.max_idle_per_engine:
            connection.detach()
            connection.idle_since_s = self._loop.time()
            idle.append(connection)
        else:
            connection.close()

    def _look(self) -> None:
        """One timer for all exchanges, while there are any."""
        self._looking = self._loop.call_later(_LOOK_S, self._look) if self._busy else None
        for busy in self._busy.values():
            for connection in busy:
                connection.look()

    def _forget_busy(self, address: str, connection: UpstreamConnection) -> None:
        busy = self._busy[address]
        busy.discard(connection)
        if not busy:
            del self._busy[address]

    def fail_quiet(self, address: str, quiet_s: float, min_age_s: float, error: Exception) -> int:
        """End the exchanges with an engine that nothing has come from for `quiet_s`, that began
        at least `min_age_s` ago and that another engine could take over. Returns how many.

        One that is silent because its client reads slowly is left alone."""
        now_s = self._loop.time()
        quiet_s -= _LOOK_S  # what came last was seen so much later at the most
        quiet = [
            connection
            for connection in self._busy.get(address, ())
            if connection.is_movable
            and not connection.is_reading_paused
            and now_s - connection.last_data_s >= quiet_s
            and now_s - connection.begun_s >= min_age_s
        ]
        for connection in quiet:
            connection.fail(error)
        return len(quiet)

    def prune(self) -> None:
        """Close connections that were idle for too long; called about once a second."""
        oldest_s = self._loop.time() - self.limits.keep_alive_s
        for address, idle in list(self._idle.items()):
            kept = [c for c in idle if c.is_open and c.idle_since_s > oldest_s]
            for connection in idle:
                if connection not in kept:
                    connection.close()
            if kept:
                self._idle[address] = kept
            else:
                del self._idle[address]

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()
        if self._looking is not None:
            self._looking.cancel()
