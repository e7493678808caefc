"""The few raw ASGI steps that the hot routes need: a bounded body, a whole answer, a stream's head.

Raw, because a web framework's request and response objects cost more than a token does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from kvoy_contract.errors import ApiError, PayloadTooLarge, RequestTimeout

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON_TYPE = b"application/json"
STREAM_TYPE = b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The client hung up: nobody is left to answer."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first value of a header; `name` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole request body.

    Raises PayloadTooLarge as soon as it is known to be larger, RequestTimeout when it does not come
    in time, ClientGone when the client hangs up.
    """
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _receive_all(receive, max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"The request did not arrive within {timeout_s:g} seconds.") from None


async def _receive_all(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if body := message.get("body"):
            parts.append(body)
            num_bytes += len(body)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than {max_bytes} bytes.")


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns once the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_body(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = JSON_TYPE,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(
    send: Send, error: ApiError, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    own = [(name.encode(), value.encode()) for name, value in error.headers()]
    await send_body(send, error.status, error.to_json(), headers=[*own, *headers])


async def start_stream(send: Send, headers: Iterable[tuple[bytes, bytes]]) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-type", STREAM_TYPE),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *headers,
            ],
        }
    )


async def send_part(send: Send, body: bytes, *, is_last: bool = False) -> None:
    """Waits while the client reads too slowly."""
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
