"""Runs an ASGI application behind the router's own HTTP server, for everything but the byte path.

HTTP only. The request is complete before the application starts, and `http.disconnect` never comes:
a client that goes away cancels the application's task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote_to_bytes

from kvoy_router.http_message import Headers, Request
from kvoy_router.http_response import Response

Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


async def run_asgi(app: AsgiApp, request: Request, response: Response) -> None:
    """Answer `request` by `app`. Whatever the application raises is raised here."""
    answer = _Answer(response)
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()
        is_read = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    await app(_scope(request), receive, answer.send)
    response.end()


def _scope(request: Request) -> Message:
    raw_path, _, _ = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.0" if request.is_http_1_0 else "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote_to_bytes(request.path).decode("utf-8", "replace"),
        "raw_path": raw_path,
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": None,
        "server": None,
    }


class _Answer:
    """Turns ASGI messages into calls of `Response`; small bodies go out in one write."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._status = 0
        self._headers: Headers = []
        self._can_write = asyncio.Event()
        self._can_write.set()
        response.on_pause = self._can_write.clear
        response.on_resume = self._can_write.set

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = list(message["headers"])
            return
        assert message["type"] == "http.response.body", message["type"]
        if not self._response.status:
            self._start()
        self._response.write(message.get("body", b""))
        if not message.get("more_body", False):
            self._response.end()
        await self._can_write.wait()

    def _start(self) -> None:
        length: int | None = None
        headers: Headers = []
        for name, value in self._headers:
            lower = name.lower()
            if lower == b"content-length":
                length = int(value)
            elif lower not in (b"date", b"connection", b"transfer-encoding"):
                headers.append((lower, value))
        self._response.start(self._status, headers, length)
