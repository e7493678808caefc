"""The engine's gRPC surface: who it is, its tokenizer, and a watch stream for every router.

It turns `watch.WatchHub`'s state into messages and knows nothing of HTTP or of the core. With a
per-service secret configured, every call must show it; gRPC health is open to probes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from grpc.aio import ServicerContext as Context
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvoy_contract import blocks, envelope
from kvoy_contract.names import SECRET_METADATA_KEY
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as rpc
from kvoy_engine.watch import PendingChanges, Watcher, WatchHub

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
HELLO_TIMEOUT_S: Final = 10.0
HASHES_PER_MESSAGE: Final = 16384
FILE_PART_BYTES: Final = 1 << 20
MAX_STREAMS: Final = 1024
_KEEPALIVE_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a shared port
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class LiveState:
    """The parts of a load report that the core does not know."""

    uptime_s: float
    last_step_age_s: float
    is_draining: bool
    is_ready: bool
    free_device_bytes: int


class TelemetryServicer(rpc.TelemetryServicer):
    """Serves one engine's description, tokenizer files and watch streams.

    Until it knows the engine, every call is answered with UNAVAILABLE.
    """

    def __init__(
        self, hub: WatchHub, live_state: Callable[[], LiveState], secret: str | None
    ) -> None:
        self._description = pb.EngineDescription()
        self._tokenizer_parts: Mapping[str, bytes] = {}
        self._is_loaded = False
        self._hub = hub
        self._live_state = live_state
        self._secret = secret

    def describe(
        self, description: pb.EngineDescription, tokenizer_parts: Mapping[str, bytes]
    ) -> None:
        """The model is loaded: from now on calls are served."""
        self._description = description
        self._tokenizer_parts = tokenizer_parts
        self._is_loaded = True

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.EngineDescription:
        await self._admit(context)
        return self._description

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.TokenizerFile]:
        await self._admit(context)
        if request.digest and request.digest != self._description.tokenizer_digest:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"this engine's tokenizer is {self._description.tokenizer_digest}",
            )
        for name, data in self._tokenizer_parts.items():
            for start in range(0, max(1, len(data)), FILE_PART_BYTES):
                part = data[start : start + FILE_PART_BYTES]
                is_last = start + FILE_PART_BYTES >= len(data)
                yield pb.TokenizerFile(name=name, data=part, last=is_last)

    async def Watch(self, request_iterator: Any, context: Context) -> None:
        """One router's stream, until it hangs up or the server stops."""
        await self._admit(context)
        hello = await self._read_hello(context)
        if self._hub.num_watchers >= MAX_STREAMS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch streams")
        with self._hub.watch(hello.router_id) as watcher:
            logger.info("watch stream opened router=%s", hello.router_id)
            stream = _WatchStream(self._description.epoch, watcher, self._hub, context)
            try:
                await self._run_stream(stream)
            finally:
                logger.info("watch stream closed router=%s", hello.router_id)

    async def _run_stream(self, stream: _WatchStream) -> None:
        """Read acknowledgements beside the writes; the end of either ends both."""
        reads = asyncio.ensure_future(stream.read_acknowledgements())
        writes = asyncio.ensure_future(stream.write_events(self._live_state))
        try:
            done, _ = await asyncio.wait((reads, writes), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reads.cancel()
            writes.cancel()
            await asyncio.gather(reads, writes, return_exceptions=True)
        for task in done:
            task.result()

    async def _read_hello(self, context: Context) -> pb.Hello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came")
        if first is grpc.aio.EOF or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is a hello")
        if not first.hello.router_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "hello.router_id is empty")
        hello: pb.Hello = first.hello
        return hello

    async def _admit(self, context: Context) -> None:
        """Ends the call of whoever lacks the secret, and every one before the model is loaded."""
        if self._secret is not None:
            shown = dict(context.invocation_metadata() or ()).get(SECRET_METADATA_KEY)
            if not envelope.secret_matches(self._secret, shown):
                await context.abort(
                    grpc.StatusCode.UNAUTHENTICATED, f"{SECRET_METADATA_KEY} is missing or wrong"
                )
        if not self._is_loaded:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")


class _WatchStream:
    """Writes one router's events in order, numbered from 1, at a bounded rate."""

    def __init__(self, epoch: bytes, watcher: Watcher, hub: WatchHub, context: Context) -> None:
        self._epoch = epoch
        self._watcher = watcher
        self._hub = hub
        self._context = context
        self._seq = 0
        self._snapshot_seq = 0

    async def read_acknowledgements(self) -> None:
        while (request := await self._context.read()) is not grpc.aio.EOF:
            ack = request.snapshot_ack
            is_latest = ack.epoch == self._epoch and ack.seq == self._snapshot_seq
            if request.WhichOneof("message") == "snapshot_ack" and is_latest:
                self._hub.on_acknowledged(self._watcher)

    async def write_events(self, live_state: Callable[[], LiveState]) -> None:
        watcher = self._watcher
        while True:
            await watcher.wait(HEARTBEAT_S)
            if watcher.needs_snapshot:
                await self._write_snapshot()
            if (changes := watcher.take_changes()) is not None:
                await self._write_changes(changes)
            if watcher.needs_load:
                watcher.needs_load = False
                await self._write(load=load_report(self._hub, watcher.router_id, live_state()))
            await asyncio.sleep(self._hub.min_interval_s)

    async def _write_snapshot(self) -> None:
        self._watcher.begin_snapshot()
        packed = self._hub.packed_hashes()
        num_hashes = len(packed) // blocks.HASH_BYTES
        await self._write(snapshot_begin=pb.SnapshotBegin(num_hashes=num_hashes))
        step = HASHES_PER_MESSAGE * blocks.HASH_BYTES
        for start in range(0, len(packed), step):
            chunk = pb.SnapshotChunk(hashes=packed[start : start + step], tier=pb.TIER_DEVICE)
            await self._write(snapshot_chunk=chunk)
        self._snapshot_seq = self._seq + 1
        await self._write(snapshot_end=pb.SnapshotEnd())

    async def _write_changes(self, changes: PendingChanges) -> None:
        for delta in split_changes(changes, HASHES_PER_MESSAGE):
            await self._write(blocks=delta)

    async def _write(self, **event: Any) -> None:
        self._seq += 1
        epoch = self._epoch if "snapshot_begin" in event else b""
        await self._context.write(pb.WatchEvent(seq=self._seq, epoch=epoch, **event))


def split_changes(changes: PendingChanges, max_hashes: int) -> list[pb.BlockDelta]:
    """Deltas of bounded size which, applied one after the other, say what `changes` says."""
    deltas = []
    removed, stored = list(changes.removed), list(changes.stored)
    cleared = changes.cleared
    while cleared or removed or stored:
        room = max_hashes - len(removed[:max_hashes])
        deltas.append(
            pb.BlockDelta(
                cleared=cleared,
                removed=b"".join(removed[:max_hashes]),
                stored=b"".join(stored[:room]),
                tier=pb.TIER_DEVICE,
            )
        )
        cleared, removed, stored = False, removed[max_hashes:], stored[room:]
    return deltas


def load_report(hub: WatchHub, router_id: str, live: LiveState) -> pb.LoadReport:
    """The hub's last load as this router must read it."""
    load = hub.load
    admitted = hub.ledger.of(router_id)
    return pb.LoadReport(
        running=load.running,
        waiting=load.waiting,
        queued_prefill_tokens=load.queued_prefill_tokens,
        free_blocks=load.free_blocks,
        evictable_blocks=load.evictable_blocks,
        total_blocks=load.total_blocks,
        free_device_bytes=live.free_device_bytes,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        step_time_s=load.step_time_s,
        draining=live.is_draining,
        ready=live.is_ready,
        admitted_through=admitted.through,
        admitted_beyond=sorted(admitted.beyond),
        running_tokens=load.running_tokens,
        num_preemptions=load.num_preemptions,
        uptime_s=live.uptime_s,
        generated_tokens=load.generated_tokens,
        last_step_age_s=live.last_step_age_s,
    )


class GrpcHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """`grpc.health.v1`: SERVING while the engine is ready, as `/ready` says."""

    POLL_S: Final = 1.0

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        return self._response()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        previous = None
        while True:
            response = self._response()
            if response != previous:
                yield response
            previous = response
            await asyncio.sleep(self.POLL_S)

    def _response(self) -> health_pb2.HealthCheckResponse:
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self._is_ready() else status.NOT_SERVING)


def create_server() -> grpc.aio.Server:
    return grpc.aio.server(options=_KEEPALIVE_OPTIONS)


def add_services(
    server: grpc.aio.Server, servicer: TelemetryServicer, is_ready: Callable[[], bool]
) -> None:
    """Register everything; before `server.start()`."""
    rpc.add_TelemetryServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(GrpcHealth(is_ready), server)
