"""The engine's gRPC surface: who it is, its tokenizer, and a watch stream for every router.

It carries what `watch_stream` says and knows nothing of HTTP or of the core. With a per-service
secret configured, every call must show it; gRPC health is open to probes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio
from grpc.aio import ServicerContext as Context
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvoy_contract import envelope
from kvoy_contract.names import SECRET_METADATA_KEY
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as rpc
from kvoy_engine.watch import WatchHub
from kvoy_engine.watch_stream import LiveState, WatchStream

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 10.0
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
        wire = _Wire(self._hub, context)
        with self._hub.watch(hello.router_id, wire.on_news) as watcher:
            logger.info("watch stream opened router=%s", hello.router_id)
            stream = WatchStream(self._description.epoch, watcher, self._hub, self._live_state)
            try:
                await self._run_stream(wire, stream)
            finally:
                logger.info("watch stream closed router=%s", hello.router_id)

    async def _run_stream(self, wire: _Wire, stream: WatchStream) -> None:
        """Read what the router says beside the writes; the end of either ends both."""
        reads = asyncio.ensure_future(wire.read_answers(stream))
        writes = asyncio.ensure_future(wire.write_events(stream))
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


class _Wire:
    """Carries one stream's events to its router, and what the router says back."""

    def __init__(self, hub: WatchHub, context: Context) -> None:
        self._hub = hub
        self._context = context
        self._news = asyncio.Event()

    def on_news(self) -> None:
        self._news.set()

    async def read_answers(self, stream: WatchStream) -> None:
        while (request := await self._context.read()) is not grpc.aio.EOF:
            match request.WhichOneof("message"):
                case "snapshot_ack":
                    stream.on_acknowledged(request.snapshot_ack)
                case "pace":
                    stream.on_pace(request.pace)

    async def write_events(self, stream: WatchStream) -> None:
        while True:
            await self._until_due(stream)
            for event in stream.events():
                await self._context.write(event)
            stream.rest(self._hub.now_s())

    async def _until_due(self, stream: WatchStream) -> None:
        while (left_s := stream.due_s() - self._hub.now_s()) > 0:
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._news.wait()


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
