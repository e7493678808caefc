"""Notice that a client has hung up, while nothing is being written to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvoy_engine.asgi import ClientGone, Receive, wait_for_disconnect
from kvoy_engine.link import OutputStream


@asynccontextmanager
async def fail_when_client_leaves(receive: Receive, stream: OutputStream) -> AsyncIterator[None]:
    """Within the context, `stream` fails with ClientGone once the client has hung up."""
    watcher = asyncio.ensure_future(_watch(receive, stream))
    try:
        yield
    finally:
        watcher.cancel()


async def _watch(receive: Receive, stream: OutputStream) -> None:
    await wait_for_disconnect(receive)
    stream.fail(ClientGone())
