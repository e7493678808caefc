"""A TCP proxy that a test can cut."""

from __future__ import annotations

import asyncio
import contextlib


class Cutter:
    """Stands before a server on loopback."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._frozen: set[asyncio.StreamWriter] = set()

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """Reset the connections that are open now."""
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """The connections that are open now stay so, and carry nothing any more."""
        self._frozen |= self._writers

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        pair = {writer, other_writer}
        self._writers |= pair
        try:
            await asyncio.gather(self._pump(reader, other_writer), self._pump(other_reader, writer))
        finally:
            for one in pair:
                one.transport.abort()
            self._writers -= pair
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if writer in self._frozen:
                    continue
                writer.write(data)
                await writer.drain()
        if writer not in self._frozen:
            writer.close()
