"""An asynchronous client of the API: many requests at once, and watches that begin with a list."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from lightkube.config import client_adapter

from kvoy_cluster.api import ApiError
from kvoy_operator.api import load_kubeconfig

Body = Mapping[str, Any]
OnEvent = Callable[[str, Body], None]
"""Takes the type (`ADDED`, `MODIFIED`, `DELETED`) and the object."""

_MAX_CONNECTIONS = 64
_TIMEOUT_S = 60.0
_MAX_LINE_BYTES = 4 << 20


class Client:
    def __init__(self, session: aiohttp.ClientSession, server: str) -> None:
        self._session = session
        self._server = server
        self._limit = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def request(
        self, method: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> Any:
        """The answer's JSON. Raises ApiError."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": content_type}
        timeout = aiohttp.ClientTimeout(_TIMEOUT_S)
        async with (
            self._limit,
            self._session.request(
                method, f"{self._server}{path}", data=data, headers=headers, timeout=timeout
            ) as answer,
        ):
            raw = await answer.read()
        if answer.status >= 400:
            raise ApiError(answer.status, raw.decode(errors="replace"))
        return msgspec.json.decode(raw)

    async def watch(self, path: str, selector: str, on_event: OnEvent) -> None:
        """Tell of every object and of every change, until cancelled.

        The server ends a watch that is read too slowly: then all objects are told of once more.
        """
        query = f"labelSelector={selector}" if selector else ""
        while True:
            found = await self.request("GET", f"{path}?{query}")
            for item in found["items"]:
                on_event("ADDED", item)
            version = found["metadata"]["resourceVersion"]
            with contextlib.suppress(aiohttp.ClientError):
                await self._follow(f"{path}?{query}&watch=1&resourceVersion={version}", on_event)

    async def _follow(self, path: str, on_event: OnEvent) -> None:
        """Return when the server ends the watch."""
        async with self._session.get(
            f"{self._server}{path}",
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_MAX_LINE_BYTES,
        ) as answer:
            async for line in answer.content:
                event = msgspec.json.decode(line)
                if event["type"] == "ERROR":
                    return
                on_event(event["type"], event["object"])


@asynccontextmanager
async def connect(kubeconfig: Path) -> AsyncIterator[Client]:
    """A client that talks as the kubeconfig's user does, by a certificate."""
    config = load_kubeconfig(str(kubeconfig))
    assert config.user is not None  # lightkube gives every context a user
    tls = client_adapter.verify_cluster(config.cluster, config.user, config.abs_file)
    connector = aiohttp.TCPConnector(limit=0, ssl=tls)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Client(session, config.cluster.server)
