"""uvicorn's HTTP protocol with a deadline for receiving a request.

uvicorn closes a connection that is idle between two requests; this closes one, too, whose client
opens it and stays silent, or sends its request byte by byte.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

GRACE_S = 5.0
"""Beyond the application's own limit, which answers with status 408 where it still can."""


def protocol_with_deadline(read_timeout_s: float) -> type[HttpToolsProtocol]:
    """A protocol class whose connections get a whole request in `read_timeout_s`, or are closed."""

    class DeadlineProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._arm()

        def on_message_complete(self) -> None:
            self._disarm()
            super().on_message_complete()

        def _arm(self) -> None:
            self._disarm()
            self._deadline = self.loop.call_later(read_timeout_s + GRACE_S, self.transport.close)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return DeadlineProtocol
