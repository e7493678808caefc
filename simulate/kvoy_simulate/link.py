"""One router's telemetry of one engine address, in virtual time.

The same way as `kvoy_router.telemetry.TelemetryClient` goes over gRPC, with the same parts: it asks
who is there, opens a watch stream (`kvoy_engine.watch_stream`), reads it
(`kvoy_router.watch_reader`), and begins anew after a pause when it breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_engine.watch import Watcher
from kvoy_engine.watch_stream import HEARTBEAT_S, WatchStream
from kvoy_router.pool import Pool
from kvoy_router.report_pace import ReportPace
from kvoy_router.watch_reader import SILENCE_S, Pauses, StreamBroken, WatchReader
from kvoy_simulate.clock import VirtualClock
from kvoy_simulate.engine import VirtualEngine


class TelemetryLink:
    def __init__(
        self,
        clock: VirtualClock,
        pool: Pool,
        address: str,
        delay_s: float,
        engine_at: Callable[[str], VirtualEngine | None],
        random: Random,
    ) -> None:
        """`engine_at` gives the process that answers at the address now, if one does."""
        self._clock = clock
        self._pool = pool
        self._address = address
        self._delay_s = delay_s
        self._engine_at = engine_at
        self._pauses = Pauses(random)
        self._open: _OpenStream | None = None
        self._is_cut = False
        self._is_closed = False
        self.is_in_sync = False
        self.has_failed = False
        """Whether an attempt to watch the engine has failed since the router's start."""
        self.num_events = 0

    def connect(self) -> None:
        """Ask the engine who it is, and watch it."""
        if self._is_closed:
            return
        engine = None if self._is_cut else self._engine_at(self._address)
        if engine is None:
            self._clock.after(2 * self._delay_s, self._lose)
        elif (hung_until_s := engine.hung_until_s()) is not None:
            self._clock.at(min(hung_until_s, self._clock.now_s + SILENCE_S), self._lose)
        else:
            self._clock.after(2 * self._delay_s, self._watch, engine)

    def cut(self) -> None:
        """The network between the two is gone: the stream breaks, and no other can be opened."""
        self._is_cut = True
        if self._open is not None:
            self.on_broken(self._open.engine)

    def mend(self) -> None:
        self._is_cut = False

    def on_broken(self, engine: VirtualEngine) -> None:
        """That process has gone; its stream, if there is one, has ended."""
        if self._open is not None and self._open.engine is engine:
            self._lose()

    def close(self) -> None:
        """The router needs it no more."""
        self._is_closed = True
        self._drop_stream()

    def _watch(self, engine: VirtualEngine) -> None:
        if self._is_closed:
            return
        if self._is_cut or not engine.is_alive:
            self._lose()
            return
        info = engine.info
        self._pool.on_describe(self._address, info, self._clock.now_s)
        reader = WatchReader(self._pool, self._address, info.epoch)
        pace = ReportPace(self._pool.config.max_reports_per_s)
        self._open = _OpenStream(self._clock, engine, reader, pace, self)
        self._ask_pace(self._open)

    def on_events(self, stream: _OpenStream, events: list[pb.WatchEvent]) -> None:
        """They have arrived. A stream that was given up meanwhile is not heard any more."""
        if stream is not self._open:
            return
        now_s = self._clock.now_s
        stream.heard_s = now_s
        self.num_events += len(events)
        self._ask_pace(stream)
        try:
            for event in events:
                ack = stream.reader.take(event, now_s)
                if ack is not None:
                    self.is_in_sync = True
                    self._clock.after(self._delay_s, stream.acknowledge, ack)
        except StreamBroken:
            self._lose()

    def _ask_pace(self, stream: _OpenStream) -> None:
        interval_s = stream.pace.next_s(self._pool.num_endpoints)
        if interval_s is not None:
            self._clock.after(self._delay_s, stream.ask_pace, pb.Pace(min_interval_s=interval_s))

    def on_silence(self, stream: _OpenStream) -> None:
        if stream is self._open:
            self._lose()

    @property
    def router_id(self) -> str:
        return self._pool.router_id

    @property
    def delay_s(self) -> float:
        return self._delay_s

    def _lose(self) -> None:
        if self._is_closed:
            return
        self._drop_stream()
        self.has_failed = True
        self._pool.on_lost(self._address, self._clock.now_s)
        pause_s = self._pauses.next_s(was_in_sync=self.is_in_sync)
        self.is_in_sync = False
        self._clock.after(pause_s, self.connect)

    def _drop_stream(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


class _OpenStream:
    """The engine's side of one stream, and the router's look at how long it has been silent."""

    def __init__(
        self,
        clock: VirtualClock,
        engine: VirtualEngine,
        reader: WatchReader,
        pace: ReportPace,
        link: TelemetryLink,
    ) -> None:
        self._clock = clock
        self.engine = engine
        self.reader = reader
        self.pace = pace
        self._link = link
        self._is_open = True
        self._wake_s = math.inf
        """When it looks for news next; later looks that were asked for are void."""
        self._watcher: Watcher = engine.hub.open(link.router_id, self._on_news)
        self._stream = WatchStream(engine.info.epoch, self._watcher, engine.hub, engine.live_state)
        self.heard_s = clock.now_s
        self._on_news()
        clock.after(HEARTBEAT_S, self._beat)
        clock.after(SILENCE_S, self._check_silence)

    def close(self) -> None:
        self._is_open = False
        self.engine.hub.close(self._watcher)

    def acknowledge(self, ack: pb.SnapshotAck) -> None:
        if self._is_open and self.engine.is_alive:
            self._stream.on_acknowledged(ack)

    def ask_pace(self, pace: pb.Pace) -> None:
        if self._is_open and self.engine.is_alive:
            self._stream.on_pace(pace)

    def _on_news(self) -> None:
        due_s = max(self._stream.due_s(), self._clock.now_s)
        if due_s < self._wake_s:
            self._wake_s = due_s
            self._clock.at(due_s, self._wake, due_s)

    def _wake(self, asked_s: float) -> None:
        if asked_s == self._wake_s:
            self._wake_s = math.inf
            self._speak_if_due()

    def _beat(self) -> None:
        """News come by themselves; this is for when there are none."""
        if self._is_open and self.engine.is_alive:
            self._speak_if_due()
            now_s, due_s = self._clock.now_s, self._stream.due_s()
            self._clock.at(due_s if due_s > now_s else now_s + HEARTBEAT_S, self._beat)

    def _speak_if_due(self) -> None:
        if not self._is_open or not self.engine.is_alive:
            return
        if (hung_until_s := self.engine.hung_until_s()) is not None:
            self._wake_s = hung_until_s
            self._clock.at(hung_until_s, self._wake, hung_until_s)
            return
        if self._stream.due_s() > self._clock.now_s:
            self._wake_for_news()
            return
        events = list(self._stream.events())
        self._stream.rest(self._clock.now_s)
        self._clock.after(self._link.delay_s, self._link.on_events, self, events)
        self._wake_for_news()

    def _wake_for_news(self) -> None:
        if self._stream.has_news:
            self._on_news()

    def _check_silence(self) -> None:
        if not self._is_open:
            return
        silent_s = self.heard_s + SILENCE_S
        if self._clock.now_s >= silent_s:
            self._link.on_silence(self)
        else:
            self._clock.at(silent_s, self._check_silence)
