"""What an engine's watch stream means to the pool, event by event. Pure.

Any break of the rules (a gap in the numbers, another epoch) ends the stream; whoever reads it then
tells the pool that the engine is lost, and begins anew after a pause. The time comes with each
call, from the wire's owner (`telemetry`, or a simulation)."""

from __future__ import annotations

from random import Random

from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_router.endpoint import EngineInfo, LoadView, Role
from kvoy_router.pool import Pool

SILENCE_S = 5.0
"""Engines report every second; after so long without a word a stream counts as lost."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

_ROLES = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE}


class StreamBroken(Exception):
    """The stream cannot be believed any further; the text says why."""


class Pauses:
    """Between attempts to watch one engine: they double while attempts fail, and are shortened at
    random, so that the routers of a fleet do not come all at once."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._pause_s = FIRST_PAUSE_S

    def next_s(self, *, was_in_sync: bool) -> float:
        self._pause_s = FIRST_PAUSE_S if was_in_sync else min(self._pause_s * 2, LONGEST_PAUSE_S)
        return self._pause_s * self._random.uniform(0.5, 1.0)


class WatchReader:
    """One stream of one engine, from its first event to its end."""

    def __init__(self, pool: Pool, endpoint_id: str, epoch: bytes) -> None:
        """`epoch` is the one that the engine has just described itself with."""
        self._pool = pool
        self._endpoint_id = endpoint_id
        self._epoch = epoch
        self._seq = 0

    def take(self, event: pb.WatchEvent, now_s: float) -> pb.SnapshotAck | None:
        """Hand one event to the pool; the end of a snapshot is to be acknowledged with what comes
        back. Raises StreamBroken."""
        self._seq += 1
        if event.seq != self._seq:
            raise StreamBroken(f"gap: event {event.seq} came instead of {self._seq}")
        pool, endpoint_id = self._pool, self._endpoint_id
        match event.WhichOneof("event"):
            case "load":
                pool.on_load(endpoint_id, read_load(event.load), now_s)
            case "blocks":
                pool.on_blocks(
                    endpoint_id,
                    removed=event.blocks.removed,
                    stored=event.blocks.stored,
                    cleared=event.blocks.cleared,
                    now_s=now_s,
                )
            case "snapshot_begin":
                if event.epoch != self._epoch:
                    raise StreamBroken("it has restarted")
                pool.on_snapshot_begin(endpoint_id, now_s)
            case "snapshot_chunk":
                pool.on_snapshot_chunk(endpoint_id, event.snapshot_chunk.hashes, now_s)
            case "snapshot_end":
                pool.on_snapshot_end(endpoint_id, now_s)
                return pb.SnapshotAck(epoch=self._epoch, seq=event.seq)
        return None


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
