"""Stand-in engines for measuring a router: they speak the contract, cost little and compute
nothing.

Like an engine's batch, all streams of one stand-in have their events at the same moments. Were they
as far apart as their requests came in, the arrivals that a proxy is measured by would depend on
how fast it forwards requests.

`python -m kvoy_cli.bench.fake_engine --count N --hashes H --gap-s G --report-s R [--tokenizer
FOLDER]` starts N of them in one process on free ports and prints these as one line of JSON; each
reports its load every R seconds, or less often where a router asks for it. A streamed answer is
`max_tokens` events, one write each, `gap` seconds apart, so that a proxy reads one event at a
time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import httptools
import msgspec

from kvoy_cli.bench import fake_answers
from kvoy_cli.bench.event_loop import run
from kvoy_cli.bench.fake_answers import MODEL
from kvoy_contract import envelope as envelopes
from kvoy_contract.names import ENVELOPE_CONTENT_TYPE
from kvoy_contract.prompt import TokenizerFiles, byte_tokenizer_files
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as pb_grpc

_HASH_BYTES = 16
_NUM_BLOCKS = 20_000
_HASHES_PER_CHUNK = 4096
_FILE_PART_BYTES = 1 << 20

_decode_body = msgspec.json.Decoder(fake_answers.Body).decode


class Admissions:
    """Which of a router's request numbers have arrived; what load reports settle."""

    def __init__(self) -> None:
        self.through = 0
        self.beyond: set[int] = set()

    def add(self, number: int, settled_through: int) -> None:
        self.beyond.add(number)
        if settled_through > self.through:
            self.through = settled_through
            self.beyond = {n for n in self.beyond if n > settled_through}
        while self.through + 1 in self.beyond:
            self.through += 1
            self.beyond.discard(self.through)


class Steps:
    """Calls every running stream once each `gap_s`, all of them together."""

    def __init__(self, gap_s: float, phase_s: float | None = None) -> None:
        """Steps are at `phase_s` and whole gaps after it; without it, counted from whichever
        stream finds no other."""
        self._gap_s = gap_s
        self._phase_s = phase_s
        self._streams: list[EngineConnection] = []
        self._next_s = 0.0

    @property
    def num_running(self) -> int:
        return len(self._streams)

    def add(self, stream: EngineConnection) -> None:
        self._streams.append(stream)
        if len(self._streams) == 1:
            now_s = asyncio.get_running_loop().time()
            into_gap_s = 0.0 if self._phase_s is None else (now_s - self._phase_s) % self._gap_s
            self._next_s = now_s - into_gap_s
            self._wait()

    def _wait(self) -> None:
        self._next_s += self._gap_s
        asyncio.get_running_loop().call_at(self._next_s, self._step)

    def _step(self) -> None:
        self._streams = [stream for stream in self._streams if stream.step()]
        if self._streams:
            self._wait()


class EngineConnection(asyncio.Protocol):
    """One connection; requests on it come one after the other."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._path = b""
        self._has_envelope = False
        self._body: list[bytes] = []
        self._num_left = 0
        self._events: tuple[bytes, ...] = ()
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport without inheriting from it.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._path = b""
        self._body = []
        self._has_envelope = False

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._has_envelope = value == ENVELOPE_CONTENT_TYPE.encode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if not fake_answers.generates(self._path):
            self._write(fake_answers.page(self._path))
            return
        body = b"".join(self._body)
        wants_ids = False
        num_prompt_tokens = 1
        if self._has_envelope:
            envelope, body = envelopes.decode(body)
            wants_ids = envelope.want_token_ids
            num_prompt_tokens = len(envelope.token_ids) // 4
            self._engine.admit(envelope)
        request = _decode_body(body)
        chat = fake_answers.is_chat(self._path)
        if request.stream:
            self.start_stream(chat, request, wants_ids)
        else:
            self._write(fake_answers.whole_answer(chat, request.num_tokens, num_prompt_tokens))

    def start_stream(self, chat: bool, request: fake_answers.Body, wants_ids: bool) -> None:
        self._events = fake_answers.word_events(chat, wants_ids)
        self._end = fake_answers.stream_end(chat)
        self._num_left = request.num_tokens
        self._write(fake_answers.STREAM_HEAD)
        self._engine.steps.add(self)

    def step(self) -> bool:
        """Write the next event; whether there are more."""
        if self._num_left == 0:
            self._write(self._end)
            return False
        self._num_left -= 1
        self._write(self.next_event())
        return self._transport is not None

    def next_event(self) -> bytes:
        """Framed as HTTP chunks."""
        return self._events[self._num_left % len(self._events)]

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


class FakeEngine(pb_grpc.TelemetryServicer):
    """HTTP and telemetry of one engine that holds `num_hashes` random strides of cached work."""

    def __init__(self, tokenizer: TokenizerFiles, num_hashes: int, gap_s: float) -> None:
        self.steps = Steps(gap_s)
        self.heartbeat_s = 0.5
        """Between two load reports."""
        self._tokenizer = tokenizer
        self._epoch = os.urandom(16)
        self._hashes = os.urandom(_HASH_BYTES * num_hashes)
        self._admissions: dict[str, Admissions] = {}

    def admit(self, envelope: envelopes.Envelope) -> None:
        admissions = self._admissions.setdefault(envelope.router_id, Admissions())
        admissions.add(envelope.number, envelope.settled_through)

    def connection(self) -> EngineConnection:
        return EngineConnection(self)

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.EngineDescription:
        return pb.EngineDescription(
            epoch=self._epoch,
            served_model=MODEL,
            model_identity="bench-fake",
            role=pb.ROLE_BOTH,
            block_size=16,
            hash_stride=64,
            num_blocks=_NUM_BLOCKS,
            block_bytes=1 << 20,
            max_model_len=131072,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            tokenizer_digest=self._tokenizer.digest,
            numerics="bench",
            engine_kind="kvoy",
            engine_version="0",
            capabilities=pb.Capabilities(
                envelope=True,
                token_ids=True,
                resume=True,
                cache_salt=True,
                admitted_through=True,
            ),
            vocab_size=65536,
        )

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TokenizerFile]:
        for name, data in self._tokenizer.parts.items():
            parts = [
                data[start : start + _FILE_PART_BYTES]
                for start in range(0, max(1, len(data)), _FILE_PART_BYTES)
            ]
            for index, part in enumerate(parts):
                yield pb.TokenizerFile(name=name, data=part, last=index == len(parts) - 1)

    async def Watch(
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchEvent]:
        router_id = (await anext(request_iterator)).hello.router_id
        pace = pb.Pace()
        listening = asyncio.ensure_future(_listen(request_iterator, pace))
        context.add_done_callback(lambda _: listening.cancel())
        seq = 0
        for event in self._snapshot():
            seq += 1
            event.seq = seq
            yield event
        while True:
            seq += 1
            yield pb.WatchEvent(seq=seq, load=self.load_report(router_id))
            await asyncio.sleep(max(self.heartbeat_s, pace.min_interval_s))

    def _snapshot(self) -> list[pb.WatchEvent]:
        step = _HASHES_PER_CHUNK * _HASH_BYTES
        count = len(self._hashes) // _HASH_BYTES
        return [
            pb.WatchEvent(epoch=self._epoch, snapshot_begin=pb.SnapshotBegin(num_hashes=count)),
            *(
                pb.WatchEvent(snapshot_chunk=pb.SnapshotChunk(hashes=self._hashes[at : at + step]))
                for at in range(0, len(self._hashes), step)
            ),
            pb.WatchEvent(snapshot_end=pb.SnapshotEnd()),
        ]

    def load_report(self, router_id: str) -> pb.LoadReport:
        admissions = self._admissions.get(router_id, Admissions())
        held = min(_NUM_BLOCKS, 4 * len(self._hashes) // _HASH_BYTES)
        return pb.LoadReport(
            free_blocks=_NUM_BLOCKS - held,
            evictable_blocks=held,
            total_blocks=_NUM_BLOCKS,
            prefill_tokens_per_s=10_000.0,
            step_time_s=0.01,
            ready=True,
            admitted_through=admissions.through,
            admitted_beyond=sorted(admissions.beyond),
        )


async def _listen(requests: AsyncIterator[pb.WatchRequest], pace: pb.Pace) -> None:
    """Keeps in `pace` what the router asks for."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError):
        async for request in requests:
            if request.HasField("pace"):
                pace.CopyFrom(request.pace)


@dataclass(frozen=True, slots=True)
class _Options:
    count: int
    hashes: int
    gap_s: float
    report_s: float
    tokenizer: Path | None


def _parse(argv: Sequence[str]) -> _Options:
    parser = argparse.ArgumentParser(prog="fake_engine")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--hashes", type=int, default=0)
    parser.add_argument("--gap-s", type=float, default=0.003)
    parser.add_argument("--report-s", type=float, default=0.5)
    parser.add_argument("--tokenizer", type=Path, default=None)
    return _Options(**vars(parser.parse_args(argv)))


async def serve(engines: Sequence[FakeEngine]) -> None:
    """Until it is cancelled; prints the engines' addresses as one line of JSON."""
    loop = asyncio.get_running_loop()
    entries: list[str] = []
    servers: list[grpc.aio.Server] = []
    for engine in engines:
        http = await loop.create_server(engine.connection, "127.0.0.1", 0)
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_TelemetryServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
        telemetry_port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        entries.append(f"127.0.0.1:{http.sockets[0].getsockname()[1]}@{telemetry_port}")
    print(msgspec.json.encode(entries).decode(), flush=True)
    await asyncio.Event().wait()


async def _serve(options: _Options) -> None:
    if options.tokenizer is None:
        tokenizer = byte_tokenizer_files()
    else:
        tokenizer = TokenizerFiles.from_folder(options.tokenizer)
    engines = [FakeEngine(tokenizer, options.hashes, options.gap_s) for _ in range(options.count)]
    for engine in engines:
        engine.heartbeat_s = options.report_s
    await serve(engines)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        run(_serve(_parse(sys.argv[1:])))
