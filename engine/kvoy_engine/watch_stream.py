"""One router's watch stream: which events it gets, in which order, and when. Pure.

It turns `watch.WatchHub`'s state into numbered messages. The time comes with each call; whoever
owns the wire (`telemetry`, or a simulation) asks when the next events are due, and sends them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvoy_contract import blocks
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_engine.watch import PendingChanges, Watcher, WatchHub

HEARTBEAT_S: Final = 1.0
HASHES_PER_MESSAGE: Final = 16384


@dataclass(frozen=True, slots=True)
class LiveState:
    """The parts of a load report that the core does not know."""

    uptime_s: float
    last_step_age_s: float
    is_draining: bool
    is_ready: bool
    free_device_bytes: int


class WatchStream:
    """Events are numbered from 1, at a bounded rate that the router may lower, and never less than
    one each second."""

    def __init__(
        self, epoch: bytes, watcher: Watcher, hub: WatchHub, live_state: Callable[[], LiveState]
    ) -> None:
        self._epoch = epoch
        self._watcher = watcher
        self._hub = hub
        self._live_state = live_state
        self._seq = 0
        self._snapshot_seq = 0
        self._said_s = -math.inf
        """When the last events were sent."""
        self._said_early_s = -math.inf
        """When some were sent before the router's own pace allowed it."""
        self._was_urgent = False

    @property
    def has_news(self) -> bool:
        return self._watcher.has_news

    @property
    def _interval_s(self) -> float:
        """Between two reports: the engine's own, or more where the router asks for it."""
        return max(self._hub.min_interval_s, self._watcher.asked_interval_s)

    def due_s(self) -> float:
        """When to send next, as things are: news as soon as the last events are long enough ago,
        without news a heartbeat. News may bring it forward; see `Watcher`."""
        paced_s = self._said_s + self._interval_s
        if self._watcher.is_urgent:
            # Once in each interval, so that an engine whose queue comes and goes keeps the pace.
            again_s = self._said_early_s + self._interval_s
            return min(paced_s, max(self._said_s + self._hub.min_interval_s, again_s))
        return paced_s if self._watcher.has_news else max(paced_s, self._said_s + HEARTBEAT_S)

    def rest(self, now_s: float) -> None:
        """All events have been sent."""
        if self._was_urgent and now_s < self._said_s + self._interval_s:
            self._said_early_s = now_s
        self._was_urgent = False
        self._said_s = now_s

    def on_pace(self, pace: pb.Pace) -> None:
        """The router wants to be told less often. Never less often than the heartbeat, and what is
        no interval counts as none."""
        interval_s = pace.min_interval_s
        self._watcher.ask_interval(min(interval_s, HEARTBEAT_S) if interval_s > 0 else 0.0)

    def events(self) -> Iterator[pb.WatchEvent]:
        """What is to be said now, at least a load report. What becomes news while the caller sends
        one event waits for the next call, or comes along."""
        watcher = self._watcher
        if not watcher.has_news:
            watcher.needs_load = True
        if watcher.needs_snapshot:
            yield from self._snapshot()
        if (changes := watcher.take_changes()) is not None:
            for delta in split_changes(changes, HASHES_PER_MESSAGE):
                yield self._event(blocks=delta)
        if watcher.needs_load:
            watcher.needs_load = False
            self._was_urgent |= watcher.is_urgent
            watcher.is_urgent = False
            yield self._event(load=load_report(self._hub, watcher.router_id, self._live_state()))

    def on_acknowledged(self, ack: pb.SnapshotAck) -> None:
        """Only the latest snapshot's end counts."""
        if ack.epoch == self._epoch and ack.seq == self._snapshot_seq:
            self._hub.on_acknowledged(self._watcher)

    def _snapshot(self) -> Iterator[pb.WatchEvent]:
        self._watcher.begin_snapshot()
        packed = self._hub.packed_hashes()
        num_hashes = len(packed) // blocks.HASH_BYTES
        yield self._event(epoch=self._epoch, snapshot_begin=pb.SnapshotBegin(num_hashes=num_hashes))
        step = HASHES_PER_MESSAGE * blocks.HASH_BYTES
        for start in range(0, len(packed), step):
            chunk = pb.SnapshotChunk(hashes=packed[start : start + step], tier=pb.TIER_DEVICE)
            yield self._event(snapshot_chunk=chunk)
        self._snapshot_seq = self._seq + 1
        yield self._event(snapshot_end=pb.SnapshotEnd())

    def _event(self, **fields: Any) -> pb.WatchEvent:
        self._seq += 1
        return pb.WatchEvent(seq=self._seq, **fields)


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
