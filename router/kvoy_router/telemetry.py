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

import grpc

from kvoy_contract.blocks import unpack_hashes
from kvoy_contract.names import SECRET_METADATA_KEY
from kvoy_contract.prompt import TokenizerFiles
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as pb_grpc
from kvoy_router.config import EngineAddress
from kvoy_router.endpoint import EngineInfo, LoadView, Role
from kvoy_router.pool import Pool
from kvoy_router.prompts import Prompts

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
_CALL_TIMEOUT_S = 5.0
_TOKENIZER_TIMEOUT_S = 60.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

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

_ROLES = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE}


class StreamBroken(Exception):
    """The stream cannot be believed any further; the text says why."""


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    router_id: str
    router_version: str
    secret: str = ""
    silence_s: float = 5.0
    """Engines report every second; after so long without a word the stream counts as lost."""


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
        pause_s = _FIRST_PAUSE_S
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
            pause_s = _FIRST_PAUSE_S if self._is_in_sync else min(pause_s * 2, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

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
            self._pool.on_describe(self._endpoint_id, info, self._now_s())
            self._check_names()
            await self._watch(stub, info, metadata)

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
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await call.write(pb.WatchRequest(hello=hello))
            seq = 0
            while True:
                async with asyncio.timeout(self._options.silence_s):
                    event = await call.read()
                if event is grpc.aio.EOF:
                    raise StreamBroken("it ended the stream")
                seq += 1
                if event.seq != seq:
                    raise StreamBroken(f"gap: event {event.seq} came instead of {seq}")
                if self._apply(event, info):
                    ack = pb.SnapshotAck(epoch=info.epoch, seq=event.seq)
                    async with asyncio.timeout(_CALL_TIMEOUT_S):
                        await call.write(pb.WatchRequest(snapshot_ack=ack))
        finally:
            call.cancel()

    def _apply(self, event: pb.WatchEvent, info: EngineInfo) -> bool:
        """Hand one event to the pool; True for the end of a snapshot, which is acknowledged."""
        now_s = self._now_s()
        pool, endpoint_id = self._pool, self._endpoint_id
        match event.WhichOneof("event"):
            case "snapshot_begin":
                if event.epoch != info.epoch:
                    raise StreamBroken("it has restarted")
                pool.on_snapshot_begin(endpoint_id, now_s)
            case "snapshot_chunk":
                hashes = unpack_hashes(event.snapshot_chunk.hashes)
                pool.on_snapshot_chunk(endpoint_id, hashes, now_s)
            case "snapshot_end":
                pool.on_snapshot_end(endpoint_id, now_s)
                self._note_sync()
                return True
            case "blocks":
                pool.on_blocks(
                    endpoint_id,
                    removed=unpack_hashes(event.blocks.removed),
                    stored=unpack_hashes(event.blocks.stored),
                    cleared=event.blocks.cleared,
                    now_s=now_s,
                )
            case "load":
                pool.on_load(endpoint_id, read_load(event.load), now_s)
        return False

    def _note_sync(self) -> None:
        if not self._is_in_sync:
            log.info("telemetry in sync", extra={"engine": self._name})
        self._is_in_sync = True
        self.error = None


def read_description(message: pb.EngineDescription) -> EngineInfo:
    """Raises ValueError for a description that no request could be routed by."""
    if not message.served_model:
        raise ValueError("its description names no model")
    block_size = message.block_size or 16
    stride = message.hash_stride or block_size
    if stride % block_size:
        raise ValueError(
            f"its hash stride {stride} is not a multiple of its block size {block_size}"
        )
    capabilities = message.capabilities
    return EngineInfo(
        epoch=message.epoch,
        served_model=message.served_model,
        aliases=tuple(message.aliases),
        model_identity=message.model_identity,
        adapters=tuple(message.adapters),
        role=_ROLES.get(message.role, Role.BOTH),
        block_size=block_size,
        hash_stride=stride,
        num_blocks=message.num_blocks,
        block_bytes=message.block_bytes,
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        tokenizer_digest=message.tokenizer_digest,
        numerics=message.numerics,
        engine_kind=message.engine_kind,
        engine_version=message.engine_version,
        vocab_size=message.vocab_size,
        device_memory_bytes=message.device_memory_bytes,
        takes_envelope=capabilities.envelope,
        gives_token_ids=capabilities.token_ids,
        can_resume=capabilities.resume,
        takes_transfer_ids=capabilities.transfer_ids,
        takes_cache_salt=capabilities.cache_salt,
        settles_by_number=capabilities.admitted_through,
    )


def read_load(message: pb.LoadReport) -> LoadView:
    return LoadView(
        running=message.running,
        waiting=message.waiting,
        queued_prefill_tokens=message.queued_prefill_tokens,
        free_blocks=message.free_blocks,
        evictable_blocks=message.evictable_blocks,
        total_blocks=message.total_blocks,
        free_device_bytes=message.free_device_bytes,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        step_time_s=message.step_time_s,
        draining=message.draining,
        ready=message.ready,
        admitted_through=message.admitted_through,
        admitted_beyond=tuple(message.admitted_beyond),
        running_tokens=message.running_tokens,
        num_preemptions=message.num_preemptions,
        uptime_s=message.uptime_s,
        generated_tokens=message.generated_tokens,
        last_step_age_s=message.last_step_age_s,
    )


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
