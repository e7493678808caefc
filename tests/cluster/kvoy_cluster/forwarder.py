"""Passes connections on from this machine's loopback into a cluster's network.

Runs as a process inside the network namespace, with a listening socket that was opened outside of
it: `python -m kvoy_cluster.forwarder FD HOST PORT`.
"""

from __future__ import annotations

import asyncio
import socket
import sys

_CHUNK_BYTES = 64 * 1024
_CONNECT_TIMEOUT_S = 5.0


async def _serve(listener: socket.socket, host: str, port: int) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                far_reader, far_writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        async with asyncio.TaskGroup() as both:
            both.create_task(_pass_on(reader, far_writer))
            both.create_task(_pass_on(far_reader, writer))
        for end in (writer, far_writer):
            end.close()

    server = await asyncio.start_server(handle, sock=listener)
    await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the end of one direction, while the other may go on; a reset is passed on, too."""
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    asyncio.run(_serve(listener, sys.argv[2], int(sys.argv[3])))


if __name__ == "__main__":
    main()
