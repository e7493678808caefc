"""What engines say about themselves: one gRPC client per engine, into the pool.

    describe → fetch the tokenizer, unless it is known → watch: snapshot, deltas, load reports

Whatever goes wrong (a gap in the numbers, another epoch, silence, a lost stream) has one
consequence: the engine is unknown from then on, and everything begins anew after a pause that
doubles while it goes on failing. The pool decides what unknown means."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from kvoy_contract.names import SECRET_METADATA_KEY
from kvoy_contract.prompt import TokenizerFiles
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as pb_grpc
from kvoy_router.config import EngineAddress
from kvoy_router.endpoint import EngineInfo, Knowledge
from kvoy_router.pool import Pool
from kvoy_router.prompts import Prompts
from kvoy_router.report_pace import ReportPace
from kvoy_router.time_limit import TimeLimit
from kvoy_router.watch_reader import (
    SILENCE_S,
    Pauses,
    StreamBroken,
    WatchReader,
    read_description,
)

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
_CALL_TIMEOUT_S = 5.0
_TOKENIZER_TIMEOUT_S = 60.0

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Reconnecting is this module's own business, with its own pauses.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    router_id: str
    router_version: str
    secret: str = ""
    silence_s: float = SILENCE_S
    """After so long without a word the stream counts as lost."""


class TelemetryClient:
    """Watches one engine for as long as `run` runs."""

    def __init__(
        self,
        engine: EngineAddress,
        pool: Pool,
        prompts: Prompts,
        options: TelemetryOptions,
        now_s: Callable[[], float],
        name: str = "",
    ) -> None:
        """`name` is the engine's in logs; its address without one."""
        self._engine = engine
        self._name = name or engine.http
        self._endpoint_id = engine.http
        self._pool = pool
        self._prompts = prompts
        self._options = options
        self._now_s = now_s
        self._is_in_sync = False
        self.error: str | None = None
        """Why there is no stream now."""
        self._mismatch: str | None = None
        self._is_unreachable = False
        """Whether that is because nobody answers."""

    async def run(self) -> None:
        """Never returns; cancel it."""
        pauses = Pauses(random.Random())
        while True:
            self._is_in_sync = False
            try:
                await self._follow()
            except (StreamBroken, grpc.RpcError, TimeoutError, ValueError) as error:
                self._report_loss(_describe_error(error), is_unreachable=_is_unreachable(error))
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # A defect here must not leave an engine watched by nobody.
                log.exception("telemetry client failed", extra={"engine": self._name})
                self._report_loss(repr(error))
            await asyncio.sleep(pauses.next_s(was_in_sync=self._is_in_sync))

    def _report_loss(self, reason: str, *, is_unreachable: bool = False) -> None:
        fields = {"engine": self._name, "reason": reason}
        if self._is_in_sync:
            log.warning("telemetry lost", extra=fields)
        elif not is_unreachable and (self.error is None or self._is_unreachable):
            # An engine that is there and cannot be watched: it stays so until somebody acts.
            log.warning("telemetry fails", extra=fields)
        elif self.error is None:
            # Usual while a stack starts.
            log.info("telemetry not reachable yet", extra=fields)
        self._is_unreachable = is_unreachable
        self.error = reason
        self._pool.on_lost(self._endpoint_id, self._now_s())

    async def _follow(self) -> None:
        metadata = ((SECRET_METADATA_KEY, self._options.secret),) if self._options.secret else ()
        async with grpc.aio.insecure_channel(
            self._engine.telemetry, options=_CHANNEL_OPTIONS
        ) as channel:
            stub = pb_grpc.TelemetryStub(channel)  # type: ignore[no-untyped-call]
            description = await stub.Describe(
                pb.DescribeRequest(), metadata=metadata, timeout=_CALL_TIMEOUT_S
            )
            await self._ensure_tokenizer(stub, description, metadata)
            info = read_description(description)
            self._check_identity(info)
            self._pool.on_describe(self._endpoint_id, info, self._now_s())
            self._check_names()
            await self._watch(stub, info, metadata)

    def _check_identity(self, info: EngineInfo) -> None:
        """An engine may have several addresses. To count its memory and its queue twice, and to
        fail over from it to itself, helps nobody. Raises StreamBroken while it is watched at
        another address."""
        for other in self._pool.endpoints:
            is_same = other.info is not None and other.info.epoch == info.epoch
            if is_same and other.id != self._endpoint_id and other.knowledge is not Knowledge.LOST:
                raise StreamBroken(f"it is the engine that is known as {other.name}")

    def _check_names(self) -> None:
        mismatch = self._pool.mismatch(self._endpoint_id)
        if mismatch is not None and mismatch != self._mismatch:
            log.warning(
                "engine serves another model", extra={"engine": self._name, "reason": mismatch}
            )
        self._mismatch = mismatch

    async def _ensure_tokenizer(
        self,
        stub: pb_grpc.TelemetryStub,
        description: pb.EngineDescription,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        digest = description.tokenizer_digest
        if not digest:
            return
        async with self._prompts.lock(digest):
            if self._prompts.get(digest) is not None:
                return
            parts: dict[str, bytearray] = {}
            async with asyncio.timeout(_TOKENIZER_TIMEOUT_S):
                call = stub.GetTokenizer(pb.GetTokenizerRequest(digest=digest), metadata=metadata)
                async for part in call:
                    parts.setdefault(part.name, bytearray()).extend(part.data)
                    if sum(map(len, parts.values())) > _MAX_TOKENIZER_BYTES:
                        raise StreamBroken("its tokenizer is too large")
            files = TokenizerFiles.from_parts({name: bytes(data) for name, data in parts.items()})
            if files.digest != digest:
                raise StreamBroken("its tokenizer differs from the digest that it described")
            await self._prompts.add(files, description.vocab_size or None)

    async def _watch(
        self, stub: pb_grpc.TelemetryStub, info: EngineInfo, metadata: tuple[tuple[str, str], ...]
    ) -> None:
        call = stub.Watch(metadata=metadata)
        hello = pb.Hello(
            router_id=self._options.router_id, router_version=self._options.router_version
        )
        try:
            await self._say(call, hello=hello)
            reader = WatchReader(self._pool, self._endpoint_id, info.epoch)
            pace = ReportPace(self._pool.config.max_reports_per_s)
            while True:
                if (interval_s := pace.next_s(self._pool.num_endpoints)) is not None:
                    await self._say(call, pace=pb.Pace(min_interval_s=interval_s))
                with TimeLimit(self._options.silence_s):
                    event = await call.read()
                if event is grpc.aio.EOF:
                    raise StreamBroken("it ended the stream")
                ack = reader.take(event, self._now_s())
                if ack is not None:
                    self._note_sync()
                    await self._say(call, snapshot_ack=ack)
        finally:
            call.cancel()

    async def _say(self, call: Any, **message: Any) -> None:
        with TimeLimit(_CALL_TIMEOUT_S):
            await call.write(pb.WatchRequest(**message))

    def _note_sync(self) -> None:
        if not self._is_in_sync:
            log.info("telemetry in sync", extra={"engine": self._name})
        self._is_in_sync = True
        self.error = None


def _is_unreachable(error: Exception) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


def _describe_error(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    if isinstance(error, TimeoutError):
        return "silence"
    return str(error)
