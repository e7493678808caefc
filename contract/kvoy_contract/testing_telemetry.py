"""The telemetry half of the fake engine: a real gRPC server that says what a test tells it to say.

See `testing.FakeEngine`, which adds the HTTP half.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvoy_contract import envelope as envelopes
from kvoy_contract import names
from kvoy_contract.blocks import BlockHash, pack_hashes
from kvoy_contract.prompt import TokenizerFiles, byte_tokenizer_files
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as pb_grpc


@dataclass(slots=True, eq=False)
class _Stream:
    """One router's Watch stream; None in the queue breaks it off."""

    router_id: str
    queue: asyncio.Queue[pb.WatchEvent | None] = field(default_factory=asyncio.Queue)
    seq: int = 0
    num_acks: int = 0
    asked_interval_s: float = 0.0


class FakeTelemetry(pb_grpc.TelemetryServicer):
    """Describes an engine, keeps its Watch streams, and reports what tests change."""

    def __init__(
        self,
        model: str = "m",
        *,
        aliases: tuple[str, ...] = (),
        identity: str | None = None,
        secret: str = "",
        envelope: bool = True,
        resume: bool = False,
        numerics: str = "",
        engine_kind: str = "kvoy",
        max_num_seqs: int = 64,
        num_blocks: int = 1024,
        max_model_len: int = 8192,
        heartbeat_s: float = 0.2,
        tokenizer: TokenizerFiles | None = None,
        telemetry_port: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        """`host` is a loopback address to listen on."""
        self.host = host
        self.tokenizer = tokenizer or byte_tokenizer_files()
        self.secret = secret
        self.heartbeat_s = heartbeat_s
        self.in_flight = 0
        """Reported as running up to `max_num_seqs`, and beyond it as waiting."""
        self.num_describes = 0
        self.num_tokenizer_calls = 0
        self.blocks: dict[BlockHash, None] = {}
        self.is_muted = False
        """No load reports, no heartbeat."""
        self.load = pb.LoadReport(
            free_blocks=num_blocks,
            total_blocks=num_blocks,
            prefill_tokens_per_s=1000.0,
            step_time_s=0.01,
            ready=True,
        )
        self.description = pb.EngineDescription(
            epoch=os.urandom(16),
            served_model=model,
            aliases=aliases,
            model_identity=identity or f"identity-of-{model}",
            role=pb.ROLE_BOTH,
            block_size=16,
            hash_stride=64,
            num_blocks=num_blocks,
            block_bytes=4096,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            tokenizer_digest=self.tokenizer.digest,
            numerics=numerics,
            engine_kind=engine_kind,
            engine_version="0",
            capabilities=pb.Capabilities(
                envelope=envelope,
                token_ids=envelope,
                resume=resume,
                cache_salt=True,
                admitted_through=envelope,
            ),
        )
        self._telemetry_port = telemetry_port
        self._admitted: dict[str, set[int]] = {}
        self._streams: set[_Stream] = set()
        self._grpc: grpc.aio.Server | None = None

    @property
    def telemetry_address(self) -> str:
        return f"{self.host}:{self._telemetry_port}"

    @property
    def router_ids(self) -> set[str]:
        """Of the routers that watch now."""
        return {stream.router_id for stream in self._streams}

    @property
    def asked_intervals_s(self) -> set[float]:
        """Between two reports, as the routers that watch now have asked; 0: they have not."""
        return {stream.asked_interval_s for stream in self._streams}

    @property
    def num_acks(self) -> int:
        """Snapshot acknowledgements on the streams that are open now."""
        return sum(stream.num_acks for stream in self._streams)

    async def start_telemetry(self) -> None:
        """Listen; again on the same port after `stop_telemetry`."""
        self._grpc = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_TelemetryServicer_to_server(self, self._grpc)  # type: ignore[no-untyped-call]
        port = self._telemetry_port
        self._telemetry_port = self._grpc.add_insecure_port(f"{self.host}:{port}")
        await self._grpc.start()

    async def stop_telemetry(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop(None)
            self._grpc = None

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.EngineDescription:
        await self._check_secret(context)
        self.num_describes += 1
        return self.description

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TokenizerFile]:
        await self._check_secret(context)
        self.num_tokenizer_calls += 1
        if request.digest not in ("", self.tokenizer.digest):
            await context.abort(grpc.StatusCode.NOT_FOUND, "another tokenizer")
        for name, data in self.tokenizer.parts.items():
            # Two parts each, so that readers are seen to join them.
            half = len(data) // 2
            yield pb.TokenizerFile(name=name, data=data[:half])
            yield pb.TokenizerFile(name=name, data=data[half:], last=True)

    async def Watch(
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchEvent]:
        await self._check_secret(context)
        hello = await anext(request_iterator)
        stream = _Stream(hello.hello.router_id)
        self._streams.add(stream)
        helpers = [
            asyncio.create_task(self._count_acks(stream, request_iterator)),
            asyncio.create_task(self._heartbeat(stream)),
        ]
        try:
            self._put_snapshot(stream)
            while (event := await stream.queue.get()) is not None:
                yield event
            await context.abort(grpc.StatusCode.UNAVAILABLE, "dropped")
        finally:
            self._streams.discard(stream)
            for task in helpers:
                task.cancel()

    async def _check_secret(self, context: grpc.aio.ServicerContext) -> None:
        shown = dict(context.invocation_metadata() or ()).get(names.SECRET_METADATA_KEY)
        if self.secret and not envelopes.secret_matches(self.secret, shown):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "wrong secret")

    async def _count_acks(self, stream: _Stream, requests: AsyncIterator[pb.WatchRequest]) -> None:
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError):
            async for message in requests:
                stream.num_acks += message.HasField("snapshot_ack")
                if message.HasField("pace"):
                    stream.asked_interval_s = message.pace.min_interval_s

    async def _heartbeat(self, stream: _Stream) -> None:
        while True:
            if not self.is_muted:
                self._put_load(stream)
            await asyncio.sleep(self.heartbeat_s)

    def _put(self, stream: _Stream, event: pb.WatchEvent) -> None:
        stream.seq += 1
        event.seq = stream.seq
        stream.queue.put_nowait(event)

    def _put_snapshot(self, stream: _Stream) -> None:
        begin = pb.SnapshotBegin(num_hashes=len(self.blocks))
        self._put(stream, pb.WatchEvent(epoch=self.description.epoch, snapshot_begin=begin))
        if self.blocks:
            chunk = pb.SnapshotChunk(hashes=pack_hashes(self.blocks))
            self._put(stream, pb.WatchEvent(snapshot_chunk=chunk))
        self._put(stream, pb.WatchEvent(snapshot_end=pb.SnapshotEnd()))

    def _put_load(self, stream: _Stream) -> None:
        report = pb.LoadReport()
        report.CopyFrom(self.load)
        running = min(self.in_flight, self.description.max_num_seqs)
        report.running += running
        report.waiting += self.in_flight - running
        through = 0
        numbers = self._admitted.get(stream.router_id, set())
        while through + 1 in numbers:
            through += 1
        report.admitted_through = through
        report.admitted_beyond.extend(sorted(n for n in numbers if n > through))
        self._put(stream, pb.WatchEvent(load=report))

    def admit(self, router_id: str, number: int, settled_through: int) -> None:
        """Count a router's request into the load reports."""
        numbers = self._admitted.setdefault(router_id, set())
        numbers.add(number)
        numbers.update(range(1, settled_through + 1))

    def report_load(self, **fields: Any) -> None:
        """Change fields of the load report, and send it to every router."""
        for name, value in fields.items():
            setattr(self.load, name, value)
        if not self.is_muted:
            for stream in self._streams:
                self._put_load(stream)

    def change_blocks(
        self,
        stored: Iterable[BlockHash] = (),
        removed: Iterable[BlockHash] = (),
        cleared: bool = False,
    ) -> None:
        """Change what this engine holds, and report it."""
        stored, removed = list(stored), list(removed)
        if cleared:
            self.blocks.clear()
        for block_hash in removed:
            self.blocks.pop(block_hash, None)
        self.blocks.update(dict.fromkeys(stored))
        delta = pb.BlockDelta(
            cleared=cleared, removed=pack_hashes(removed), stored=pack_hashes(stored)
        )
        for stream in self._streams:
            self._put(stream, pb.WatchEvent(blocks=delta))

    def send_snapshot(self) -> None:
        """Begin anew inside every open stream, as an engine does whose reader was too slow."""
        for stream in self._streams:
            self._put_snapshot(stream)

    def skip_seq(self, count: int = 1) -> None:
        """Lose so many events of every stream."""
        for stream in self._streams:
            stream.seq += count

    def drop_streams(self) -> None:
        for stream in self._streams:
            stream.queue.put_nowait(None)

    def restart(self) -> None:
        """Another process on the same address: new epoch, nothing held, streams broken."""
        self.description.epoch = os.urandom(16)
        self.blocks.clear()
        self._admitted.clear()
        self.drop_streams()
