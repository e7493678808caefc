"""uvicorn's HTTP protocol with the limits that it lacks: a deadline for receiving a request, and a
bound on the size of its head.

uvicorn closes a connection that is idle between two requests; this closes one, too, whose client
opens it and stays silent, or sends its request byte by byte. What is no HTTP gets an OpenAI error
object like every other mistake.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvoy_contract.errors import BadRequest

GRACE_S = 5.0
"""Beyond the application's own limit, which answers with status 408 where it still can."""
MAX_HEAD_BYTES = 64 * 1024


def protocol_with_deadline(read_timeout_s: float) -> type[HttpToolsProtocol]:
    """A protocol class whose connections get a whole request in `read_timeout_s`, or are closed."""

    class DeadlineProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _head_bytes = 0
        _is_in_head = True

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return  # refused already; what still comes is of no use
            self._head_bytes += len(data)
            super().data_received(data)
            if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The request's headers are too large.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._is_in_head = True
            self._arm()

        def on_headers_complete(self) -> None:
            self._is_in_head = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._disarm()
            self._is_in_head, self._head_bytes = True, 0
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            body = BadRequest(msg).to_json()
            head = (
                "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.close()

        def _arm(self) -> None:
            self._disarm()
            self._deadline = self.loop.call_later(read_timeout_s + GRACE_S, self.transport.close)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return DeadlineProtocol
