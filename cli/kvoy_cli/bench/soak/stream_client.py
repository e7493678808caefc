"""Clients that keep a number of numbered streams open through a router, and check every event.

`python -m kvoy_cli.bench.soak.stream_client PORT --streams N --events E --open-per-s O` opens
streams until N are open and then one for each that ends; each has E/2 to 3E/2 events, the first N
the rest of such a one, so that as many end in each second from the beginning. Every second it
prints a line of JSON (`Progress`); when its standard input closes it stops, and its last line is
final.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections.abc import Sequence
from typing import Any, cast

import httptools
import msgspec

from kvoy_cli.bench import fake_answers
from kvoy_cli.bench.event_loop import run
from kvoy_cli.bench.request import chat
from kvoy_cli.bench.soak.numbered import StreamCheck, Tally

_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_LAST = b'"finish_reason":"length"'
_PROMPT = "Tell me all of it."
"""The same for all: it is the answers that are many. `soak prompts` is about prompts."""
_REPORT_S = 1.0
_PAUSE_AFTER_FAILURE_S = 0.5


class Progress(msgspec.Struct):
    open: int
    """Streams under way."""
    tally: Tally


class _Stream(asyncio.Protocol):
    """One connection that carries one stream after the other."""

    def __init__(self, load: StreamLoad) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._check: StreamCheck | None = None
        self._rest = b""
        self._is_complete = False

    def begin(self, label: str, num_events: int) -> None:
        assert self._transport is not None
        self._check = StreamCheck(label, num_events, self._load.tally)
        self._rest = b""
        self._is_complete = False
        messages = [{"role": "user", "content": _PROMPT}]
        request = chat(fake_answers.MODEL, messages, num_events, user=label)
        self._transport.write(request.to_bytes("127.0.0.1"))

    def close(self) -> None:
        self._check = None
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport without inheriting from it.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._check is not None:
            self._fail(f"connection lost: {exc}")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"unreadable answer: {error}")

    def on_body(self, body: bytes) -> None:
        check = self._check
        if check is None:
            return
        data = self._rest + body if self._rest else body
        start = 0
        while (end := data.find(_END, start)) >= 0:
            end += len(_END)
            self._on_event(check, data[start:end])
            start = end
        self._rest = data[start:]

    def _on_event(self, check: StreamCheck, event: bytes) -> None:
        if check.expected < check.num_events:
            check.on_event(event)
        elif event == _DONE:
            self._is_complete = True
        elif _LAST not in event and b'"usage"' not in event:
            check.on_event(event)

    def on_message_complete(self) -> None:
        if self._check is None:
            return
        status = self._parser.get_status_code()
        if status != 200 or not self._is_complete:
            self._fail(f"status {status}, ended early: {self._rest[:300]!r}")
            return
        self._check.on_end()
        self._check = None
        self._load.on_ended(self)

    def _fail(self, reason: str) -> None:
        self._check = None
        self._load.tally.fail(reason)
        if self._transport is not None:
            self._transport.close()
        self._load.on_failed(self)


class StreamLoad:
    """As many streams as asked for, one new for each that ends."""

    def __init__(self, port: int, num_streams: int, mean_events: int, seed: int = 0) -> None:
        self._port = port
        self._num_streams = num_streams
        self._mean_events = mean_events
        self._random = random.Random(seed)
        self._open: set[_Stream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_begun = 0
        self._is_stopping = False
        self.tally = Tally()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def open_all(self, per_s: float) -> None:
        for _ in range(self._num_streams):
            self._start()
            await asyncio.sleep(1 / per_s)

    def stop(self) -> None:
        """Go away from what is open: that counts neither as lost nor as failed."""
        self._is_stopping = True
        for stream in self._open:
            stream.close()

    def on_ended(self, stream: _Stream) -> None:
        if not self._is_stopping:
            stream.begin(*self._next())

    def on_failed(self, stream: _Stream) -> None:
        self._open.discard(stream)
        if not self._is_stopping:
            asyncio.get_running_loop().call_later(_PAUSE_AFTER_FAILURE_S, self._start)

    def _start(self) -> None:
        task = asyncio.ensure_future(self._connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        if self._is_stopping:
            return
        loop = asyncio.get_running_loop()
        stream = _Stream(self)
        try:
            await loop.create_connection(lambda: stream, "127.0.0.1", self._port)
        except OSError as error:
            self.tally.fail(f"cannot connect: {error}")
            self.on_failed(stream)
            return
        self._open.add(stream)
        stream.begin(*self._next())

    def _next(self) -> tuple[str, int]:
        is_first = self._num_begun < self._num_streams
        self._num_begun += 1
        whole = self._random.uniform(0.5, 1.5) * self._mean_events
        left = whole * (self._random.random() if is_first else 1.0)
        return f"s{self._num_begun}", max(1, round(left))


async def _run(options: argparse.Namespace) -> None:
    load = StreamLoad(options.port, options.streams, options.events)
    loop = asyncio.get_running_loop()
    stopped = loop.create_task(asyncio.to_thread(sys.stdin.buffer.read))
    opening = loop.create_task(load.open_all(options.open_per_s))
    while not stopped.done():
        await asyncio.wait([stopped], timeout=_REPORT_S)
        progress = Progress(load.num_open, load.tally)
        print(msgspec.json.encode(progress).decode(), flush=True)
    opening.cancel()
    load.stop()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stream_client")
    parser.add_argument("port", type=int)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--events", type=int, default=240)
    parser.add_argument("--open-per-s", type=float, default=250.0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        run(_run(_parse(sys.argv[1:])))
