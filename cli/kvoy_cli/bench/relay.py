"""The baseline of the router's cost: a relay that understands nothing.

`python -m kvoy_cli.bench.relay LISTEN_PORT TARGET_PORT... [--streams]` copies bytes between each
client and a connection of its own to the next of the targets, on uvloop. By default on bare asyncio
protocols: one read and one write per chunk, the least that any proxy on asyncio can cost. With
`--streams` it is the textbook relay on asyncio's streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from itertools import cycle
from typing import cast

from kvoy_cli.bench.event_loop import run

_READ_BYTES = 65536


class _Pipe(asyncio.Protocol):
    """Writes what it reads to its peer, and ends with it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer: _Pipe | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport without inheriting from it.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.write(data)

    def pause_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.close()


class _ClientPipe(_Pipe):
    """The client's side: keeps what it reads until the target is connected."""

    def __init__(self, target_port: int) -> None:
        super().__init__()
        self._target_port = target_port
        self._early: list[bytes] = []
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def data_received(self, data: bytes) -> None:
        if self.peer is None:
            self._early.append(data)
        else:
            super().data_received(data)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, peer = await loop.create_connection(_Pipe, "127.0.0.1", self._target_port)
        except OSError:
            if self.transport is not None:
                self.transport.close()
            return
        self.peer, peer.peer = peer, self
        if peer.transport is not None:
            peer.transport.writelines(self._early)
            if self.transport is None:
                peer.transport.close()


async def serve_protocols(listen_port: int, *target_ports: int) -> None:
    targets = cycle(target_ports)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _ClientPipe(next(targets)), "127.0.0.1", listen_port)
    async with server:
        await server.serve_forever()


async def serve_streams(listen_port: int, *target_ports: int) -> None:
    targets = cycle(target_ports)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", next(targets))
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, target_writer))
            group.create_task(_copy(target_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", listen_port)
    async with server:
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


def main(argv: Sequence[str]) -> int:
    ports = [int(argument) for argument in argv if not argument.startswith("--")]
    serve = serve_streams if "--streams" in argv else serve_protocols
    run(serve(*ports))
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
