"""What routers are told: a mirror of the reported blocks, and what each watch stream still has to
say.

Lives apart from the core, on the server's event loop: a snapshot is a copy of the mirror at one
moment, so it never stops the engine. Changes that a slow reader has not taken yet are merged; when
they outgrow their bound the stream starts anew with a snapshot. Pure: nothing here knows gRPC or
waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvoy_engine.admission import AdmissionLedger
from kvoy_engine.health import Readiness
from kvoy_engine.messages import BlockEvents, Load, StepOutput

MIN_INTERVAL_S = 0.02
"""Between two reports on a stream; a router needs nothing finer than a decode step."""
INTERVAL_PER_WATCHER_S = 0.005
MAX_INTERVAL_S = 0.25
MAX_PENDING_HASHES = 65536
"""1 MiB of hashes; a snapshot is cheaper than a longer delta."""


@dataclass(slots=True)
class PendingChanges:
    """Block events merged into one that says the same: apply cleared, removed, stored."""

    cleared: bool = False
    removed: set[bytes] = field(default_factory=set)
    stored: dict[bytes, None] = field(default_factory=dict)
    """In order: a block's parent was stored before it."""

    def add(self, events: BlockEvents) -> None:
        if events.cleared:
            self.cleared = True
            self.removed.clear()
            self.stored.clear()
        for block_hash in events.removed:
            self.stored.pop(block_hash, None)
            self.removed.add(block_hash)
        for block_hash in events.stored:
            self.removed.discard(block_hash)
            self.stored[block_hash] = None

    def __len__(self) -> int:
        return len(self.removed) + len(self.stored) + self.cleared


class Watcher:
    """One live watch stream: what it still has to be sent."""

    def __init__(self, stream_id: int, router_id: str, on_news: Callable[[], None]) -> None:
        """`on_news` is called when there is something to be sent, or it may be sent earlier, than
        before."""
        self.stream_id = stream_id
        self.router_id = router_id
        self.needs_snapshot = True
        self.needs_load = True
        self.is_urgent = False
        """Whether some of the news cannot wait for the router's own pace."""
        self.asked_interval_s = 0.0
        """Between two reports, as its router wants it at least."""
        self._changes = PendingChanges()
        self._on_news = on_news

    @property
    def has_news(self) -> bool:
        return self.needs_load or self.needs_snapshot or bool(len(self._changes))

    def add_events(self, events: BlockEvents) -> None:
        if self.needs_snapshot:
            return  # the snapshot to come includes them
        had_news = self.has_news
        self._changes.add(events)
        if len(self._changes) > MAX_PENDING_HASHES:
            self._changes = PendingChanges()
            self.needs_snapshot = True
        if not had_news:
            self._on_news()

    def request_load(self, *, is_urgent: bool = False) -> None:
        is_known = self.has_news and self.is_urgent >= is_urgent
        self.needs_load = True
        self.is_urgent |= is_urgent
        if not is_known:
            self._on_news()

    def ask_interval(self, interval_s: float) -> None:
        self.asked_interval_s = interval_s
        self._on_news()

    def take_changes(self) -> PendingChanges | None:
        """The merged changes since last asked; None when there are none."""
        if not len(self._changes):
            return None
        changes, self._changes = self._changes, PendingChanges()
        return changes

    def begin_snapshot(self) -> None:
        """From here on changes are kept for after the snapshot that is about to be copied."""
        self._changes = PendingChanges()
        self.needs_snapshot = False
        self.needs_load = True

    @property
    def num_pending(self) -> int:
        return len(self._changes)


class WatchHub:
    """The mirror of blocks and load, and all live watch streams."""

    def __init__(self, readiness: Readiness, clock: Callable[[], float]) -> None:
        self.load = Load()
        self.ledger = AdmissionLedger()
        self.readiness = readiness
        self._clock = clock
        self._hashes: set[bytes] = set()
        self._watchers: dict[int, Watcher] = {}
        self._stream_ids = itertools.count(1)

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    @property
    def num_hashes(self) -> int:
        return len(self._hashes)

    @property
    def num_pending(self) -> int:
        """Hashes that wait for the slowest stream."""
        return max((watcher.num_pending for watcher in self._watchers.values()), default=0)

    @property
    def min_interval_s(self) -> float:
        """Between two reports on one stream: the more streams, the rarer each is served."""
        return min(
            MAX_INTERVAL_S, MIN_INTERVAL_S + INTERVAL_PER_WATCHER_S * max(0, self.num_watchers - 1)
        )

    def now_s(self) -> float:
        return self._clock()

    @contextmanager
    def watch(self, router_id: str, on_news: Callable[[], None]) -> Iterator[Watcher]:
        watcher = self.open(router_id, on_news)
        try:
            yield watcher
        finally:
            self.close(watcher)

    def open(self, router_id: str, on_news: Callable[[], None]) -> Watcher:
        """A stream begins; it lasts until `close`."""
        watcher = Watcher(next(self._stream_ids), router_id, on_news)
        self._watchers[watcher.stream_id] = watcher
        self.readiness.on_watch_started(watcher.stream_id)
        return watcher

    def close(self, watcher: Watcher) -> None:
        del self._watchers[watcher.stream_id]
        self.readiness.on_watch_ended(watcher.stream_id)

    def on_step(self, output: StepOutput) -> None:
        for router_id, number in output.admitted:
            self.ledger.admit(router_id, number)
        is_changed = bool(output.admitted) or output.load != self.load
        is_urgent = (output.load.waiting > 0) != (self.load.waiting > 0)
        self.load = output.load
        if output.events:
            self._apply(output.events)
        for watcher in self._watchers.values():
            if output.events:
                watcher.add_events(output.events)
            if is_changed:
                watcher.request_load(is_urgent=is_urgent)

    def settle(self, router_id: str, number: int) -> None:
        """Count a request that never reached the core: no load of it is to be expected."""
        self.ledger.admit(router_id, number)
        for watcher in self._watchers.values():
            if watcher.router_id == router_id:
                watcher.request_load()

    def on_acknowledged(self, watcher: Watcher) -> None:
        self.readiness.on_snapshot_acknowledged(watcher.stream_id)
        self.announce()

    def announce(self) -> None:
        """Send every router a load report soon: readiness or draining has changed."""
        for watcher in self._watchers.values():
            watcher.request_load(is_urgent=True)

    def is_ready(self) -> bool:
        return self.readiness.is_ready(self._clock())

    def packed_hashes(self) -> bytes:
        """All reported hashes at this moment, 16 bytes each."""
        return b"".join(self._hashes)

    def _apply(self, events: BlockEvents) -> None:
        if events.cleared:
            self._hashes.clear()
        self._hashes.difference_update(events.removed)
        self._hashes.update(events.stored)
