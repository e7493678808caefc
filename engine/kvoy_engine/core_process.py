"""The core in a process of its own: the messages of `loop`, over a socket pair.

The parent (`ProcessCore`) starts `python -m kvoy_engine.core_process FD` and sends the
configuration; the child answers with lines of progress and then with the loaded model's
description. From then on commands go down and step outputs come up. A frame is `u32 length ‖ kind
byte ‖ MessagePack`. The end of the stream means that the other side is gone: the child then ends
itself, the parent reports the core as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvoy_contract import logs
from kvoy_engine.build import BuiltCore, CoreInfo, ModelLoadFailed, build_core
from kvoy_engine.config import ByteSize, EngineConfig
from kvoy_engine.loop import CLOSE_TIMEOUT_S, CoreSink, Inbox, describe_failure, run_core
from kvoy_engine.messages import Command, StepOutput

logger = logging.getLogger(__name__)

# Kinds of frames.
CONFIG: Final = b"c"  # parent: fields of `EngineConfig`
COMMAND: Final = b"m"  # parent: a `Command`
PROGRESS: Final = b"p"  # child: a line for people
LOADED: Final = b"l"  # child: fields of `CoreInfo`
STEP: Final = b"s"  # child: a `StepOutput`
FAILED: Final = b"f"  # child, last: why it could not load, or broke

_HEAD_BYTES: Final = 5
EXIT_TIMEOUT_S: Final = 1.0
# `ByteSize` is an int to the wire.
_encode = msgspec.msgpack.Encoder(enc_hook=int).encode
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_step_decoder = msgspec.msgpack.Decoder(StepOutput)


def frame(kind: bytes, value: Any) -> bytes:
    payload = _encode(value)
    return len(payload).to_bytes(4, "little") + kind + payload


class ProcessCore:
    """Runs a core in a child process; see `loop.CoreClient`."""

    def __init__(
        self,
        child: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._child = child
        self._reader = reader
        self._writer = writer
        self._pump: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def launch(
        cls, config: EngineConfig, progress: Callable[[str], None]
    ) -> tuple[ProcessCore, CoreInfo]:
        """Start the child and wait until it has loaded. Raises ModelLoadFailed with its reason."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "kvoy_engine.core_process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent, which decides when to end
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        core = cls(child, reader, writer)
        try:
            info = await core._load(config, progress)
        except BaseException:
            await core.close()
            raise
        return core, info

    async def _load(self, config: EngineConfig, progress: Callable[[str], None]) -> CoreInfo:
        self._writer.write(frame(CONFIG, config))
        while True:
            try:
                kind, payload = await self._read_frame()
            except (asyncio.IncompleteReadError, ConnectionError):
                raise ModelLoadFailed(
                    f"the core process ended: {await self._exit_text()}"
                ) from None
            if kind == PROGRESS:
                progress(msgspec.msgpack.decode(payload, type=str))
            elif kind == LOADED:
                return msgspec.msgpack.decode(payload, type=CoreInfo)
            else:
                raise ModelLoadFailed(msgspec.msgpack.decode(payload, type=str))

    @property
    def pid(self) -> int:
        return self._child.pid

    def start(self, sink: CoreSink) -> None:
        self._pump = asyncio.get_running_loop().create_task(self._receive(sink))

    def submit(self, command: Command) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(COMMAND, command))

    async def close(self) -> None:
        self._closing = True
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._child.wait()
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])

    async def _receive(self, sink: CoreSink) -> None:
        """Deliver step outputs until the child is gone, whatever ends it."""
        reason = None
        try:
            while reason is None:
                kind, payload = await self._read_frame()
                if kind == STEP:
                    sink.on_step(_step_decoder.decode(payload))
                else:
                    reason = msgspec.msgpack.decode(payload, type=str)
        except (asyncio.IncompleteReadError, ConnectionError):
            reason = f"the core process ended: {await self._exit_text()}"
        if not self._closing:
            logger.error("core process is gone reason=%s", reason)
            sink.on_core_failed(reason)

    async def _read_frame(self) -> tuple[bytes, bytes]:
        head = await self._reader.readexactly(_HEAD_BYTES)
        length = int.from_bytes(head[:4], "little")
        return head[4:], await self._reader.readexactly(length)

    async def _exit_text(self) -> str:
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                code = await self._child.wait()
        except TimeoutError:
            return "its connection closed"
        if code == -signal.SIGKILL:
            return f"signal {-code} (out of memory?)"
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def child_main(fd: int) -> int:
    """The child: build the core that the first frame describes, serve commands, end with the
    parent.
    """
    with socket.socket(fileno=fd) as connection:
        stream = connection.makefile("rb", buffering=256 * 1024)
        kind, payload = _read(stream)
        if kind != CONFIG:
            return 1
        config = msgspec.msgpack.decode(payload, type=EngineConfig, dec_hook=_read_size)
        logs.configure(config.log_level, config.log_format)

        def send(kind: bytes, value: Any) -> None:
            connection.sendall(frame(kind, value))

        try:
            built = build_core(config, lambda text: send(PROGRESS, text))
        except ModelLoadFailed as error:
            send(FAILED, str(error))
            return 1
        send(LOADED, built.info)
        return _serve(built, stream, send)


def _serve(built: BuiltCore, stream: Any, send: Callable[[bytes, Any], None]) -> int:
    inbox = Inbox()
    threading.Thread(target=_read_commands, args=(stream, inbox), daemon=True).start()
    try:
        run_core(built.core, inbox, lambda output: send(STEP, output))
    except ConnectionError:
        return 0  # the parent has gone
    except Exception as error:
        logger.exception("step loop failed")
        with contextlib.suppress(ConnectionError):
            send(FAILED, describe_failure(error))
        return 1
    finally:
        built.close()
    return 0


def _read_commands(stream: Any, inbox: Inbox) -> None:
    """Fill the inbox until the parent is gone, and then make sure that this process ends."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            _, payload = _read(stream)
            inbox.put(_command_decoder.decode(payload))
    inbox.close()
    # A step that never returns must not keep the process, and its memory, alive.
    exit_timer = threading.Timer(CLOSE_TIMEOUT_S, os._exit, args=(1,))
    exit_timer.daemon = True
    exit_timer.start()


def _read(stream: Any) -> tuple[bytes, bytes]:
    """One frame; raises EOFError at the end of the stream."""
    head = stream.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES:
        raise EOFError
    payload = stream.read(int.from_bytes(head[:4], "little"))
    return head[4:], payload


def _read_size(expected: type[Any], value: Any) -> ByteSize:
    assert expected is ByteSize, f"no other type of the configuration needs a hook: {expected}"
    return ByteSize(value)


if __name__ == "__main__":
    sys.exit(child_main(int(sys.argv[1])))
