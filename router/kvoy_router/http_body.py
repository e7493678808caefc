"""A request body that comes in pieces: a large one has a place in memory before it is read.

Until then its client is not read from, which stops it through TCP; what had come in the same read
as the head is kept. A body that announces no length asks for half of the room when it turns out to
be large.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvoy_contract.errors import ApiError, PayloadTooLarge, Unavailable
from kvoy_router.body_memory import SMALL_BODY_BYTES, Claim

if TYPE_CHECKING:
    from kvoy_router.http_connection import ServerConnection


def place_bytes(body_bytes: int) -> int:
    """For a body that is read: itself, with what a growing one takes in advance; once more, when it
    is put together or changed; and as much for the token ids."""
    return body_bytes * 13 // 4


def _largest_body(place_bytes: int) -> int:
    return place_bytes * 4 // 13


class IncomingBody:
    __slots__ = ("_connection", "_data", "_is_complete", "_memory", "claim")

    def __init__(self, connection: ServerConnection, data: bytes = b"") -> None:
        """`data`: what has come, and is counted."""
        self._connection = connection
        self._memory = connection.server.memory
        self._data = bytearray(data)
        self._is_complete = False
        self.claim: Claim | None = None
        """None while it is a small one, as far as is known."""

    @property
    def waits(self) -> bool:
        """Whether its client is not read from."""
        return self.claim is not None and not self.claim.is_held

    def ask(self, body_bytes: int) -> None:
        """For a place; if there is none now, the client is read from later. Raises PayloadTooLarge
        for so large a body, Unavailable when there is no room even for what has come of it, and
        what the server has against its sender."""
        connection = self._connection
        connection.server.check_sender(connection.headers)
        num_bytes, held = place_bytes(body_bytes), self._memory.held
        if num_bytes > held.most_bytes:
            raise PayloadTooLarge(
                f"The request body of {body_bytes} bytes is larger than "
                f"{_largest_body(held.most_bytes)} bytes, for which this router has memory."
            )
        self.claim = held.claim(num_bytes, self._begin)
        self._memory.give_back(len(self._data))
        if self.claim.is_held:
            self.limit_sender()
        else:
            self._stop_reading()
            self.claim.meanwhile = unread = self._memory.unread.claim(len(self._data))
            if not unread.is_held:
                raise too_many()

    def add(self, data: bytes) -> None:
        """Raises as `ask`."""
        num_bytes = len(self._data) + len(data)
        if self.claim is None:
            if not self._memory.take(len(data)):
                raise too_many()
        elif self.claim.meanwhile is not None and not self.claim.meanwhile.resize(num_bytes):
            raise too_many()
        self._data += data
        if self.claim is None and num_bytes > SMALL_BODY_BYTES:
            self._ask_for_half()

    def complete(self) -> tuple[bytes, Claim | None]:
        """The body and its place, held or not. None: it was small, and is counted as those are."""
        body = bytes(self._data)
        self._data = bytearray()
        self._is_complete = True
        if self.claim is not None:
            self.claim.resize(place_bytes(len(body)))
        return body, self.claim

    def end(self) -> None:
        """It is not to be read any more."""
        if self.claim is None:
            self._memory.give_back(len(self._data))
        else:
            self.claim.end()

    def _ask_for_half(self) -> None:
        """It may become as large as what fits into half of the room that there is now: what else
        this process holds may grow a little, and still it finds its place."""
        connection = self._connection
        largest = _largest_body(self._memory.held.max_bytes // 2)
        if largest < SMALL_BODY_BYTES:
            raise too_many()
        connection.max_body_bytes = min(connection.max_body_bytes, largest)
        if len(self._data) > connection.max_body_bytes:
            raise too_large(connection.max_body_bytes)
        self.ask(connection.max_body_bytes)

    def _stop_reading(self) -> None:
        connection = self._connection
        if connection.transport is not None:
            connection.transport.pause_reading()
        if not connection.is_answering:
            server = connection.server
            connection.deadline = server.now_s() + server.limits.memory_wait_s

    def limit_sender(self) -> None:
        """Others may wait for the place that it has."""
        connection = self._connection
        if self.claim is not None and self.claim.is_held and not connection.is_answering:
            server = connection.server
            latest_s = server.now_s() + server.limits.large_body_s
            connection.deadline = min(connection.deadline, latest_s)

    def _begin(self) -> None:
        connection = self._connection
        if connection.transport is None:
            return
        connection.resume_reading()
        if self._is_complete:
            connection.start_next()
        elif not connection.is_answering:
            connection.deadline = math.inf
            self.limit_sender()
            connection.say_continue()


def too_large(max_bytes: int) -> ApiError:
    return PayloadTooLarge(f"The request body is larger than {max_bytes} bytes.")


def too_many() -> ApiError:
    return Unavailable("Too many large requests at once.", retry_after_s=1)
