"""When a watch stream speaks, and what it says, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoy_contract.blocks import unpack_hashes
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_engine import watch
from kvoy_engine.health import Readiness
from kvoy_engine.messages import BlockEvents, Load, StepOutput
from kvoy_engine.watch import MIN_INTERVAL_S, WatchHub
from kvoy_engine.watch_stream import HEARTBEAT_S, LiveState, WatchStream

EPOCH = b"epoch"


class Engine:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.readiness = Readiness(expect_router=True, router_wait_s=30.0)
        self.readiness.on_loaded(self.now_s)
        self.hub = WatchHub(self.readiness, lambda: self.now_s)

    def watch(self, on_news: Callable[[], None] = lambda: None) -> WatchStream:
        return WatchStream(EPOCH, self.hub.open("router-a", on_news), self.hub, self.live_state)

    def live_state(self) -> LiveState:
        return LiveState(0.0, 0.0, False, self.hub.is_ready(), 0)

    def store(self, *numbers: int, running: int = 0) -> None:
        events = BlockEvents(stored=[bytes([i]) * 16 for i in numbers])
        self.hub.on_step(StepOutput(self.now_s, [], events, Load(running=running)))

    def queue(self, waiting: int, running: int = 1) -> None:
        load = Load(running=running, waiting=waiting)
        self.hub.on_step(StepOutput(self.now_s, [], BlockEvents(), load))

    def say(self, stream: WatchStream) -> list[pb.WatchEvent]:
        events = list(stream.events())
        stream.rest(self.now_s)
        return events


def kinds(events: list[pb.WatchEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def test_a_stream_begins_at_once_with_a_snapshot_and_the_load() -> None:
    engine = Engine()
    engine.store(1, 2)
    stream = engine.watch()

    assert stream.due_s() <= engine.now_s
    events = engine.say(stream)

    assert kinds(events) == ["snapshot_begin", "snapshot_chunk", "snapshot_end", "load"]
    assert [event.seq for event in events] == [1, 2, 3, 4]
    assert events[0].epoch == EPOCH
    assert sorted(unpack_hashes(events[1].snapshot_chunk.hashes)) == [b"\1" * 16, b"\2" * 16]


def test_news_wait_for_the_interval_after_the_last_events() -> None:
    engine = Engine()
    news: list[float] = []
    stream = engine.watch(lambda: news.append(engine.now_s))
    engine.say(stream)
    quiet_due_s = stream.due_s()

    engine.now_s += 0.001
    engine.store(7, running=1)

    assert quiet_due_s == pytest.approx(100.0 + HEARTBEAT_S)
    assert news
    assert stream.due_s() == pytest.approx(100.0 + MIN_INTERVAL_S)
    assert kinds(engine.say(stream)) == ["blocks", "load"]


def test_without_news_the_load_is_told_again_as_a_heartbeat() -> None:
    engine = Engine()
    stream = engine.watch()
    engine.say(stream)

    engine.now_s = stream.due_s()

    assert kinds(engine.say(stream)) == ["load"]
    assert stream.due_s() == pytest.approx(engine.now_s + HEARTBEAT_S)


def test_more_streams_are_served_more_rarely() -> None:
    engine = Engine()
    first = engine.watch()
    for _ in range(100):
        engine.watch()

    engine.say(first)
    engine.store(1)

    assert first.due_s() == pytest.approx(engine.now_s + watch.MAX_INTERVAL_S)


def test_a_router_is_told_as_seldom_as_it_asks_for() -> None:
    engine = Engine()
    stream = engine.watch()
    stream.on_pace(pb.Pace(min_interval_s=0.5))
    engine.say(stream)

    engine.store(1)

    assert stream.due_s() == pytest.approx(100.0 + 0.5)
    stream.on_pace(pb.Pace(min_interval_s=0.1))
    assert stream.due_s() == pytest.approx(100.0 + 0.1)


def test_a_router_cannot_ask_for_more_than_the_engine_gives_or_for_no_heartbeat() -> None:
    engine = Engine()
    stream = engine.watch()
    engine.say(stream)
    engine.store(1)

    for asked_s in (0.001, 0.0, -1.0, float("nan")):
        stream.on_pace(pb.Pace(min_interval_s=asked_s))
        assert stream.due_s() == pytest.approx(100.0 + MIN_INTERVAL_S)

    stream.on_pace(pb.Pace(min_interval_s=3600.0))
    assert stream.due_s() == pytest.approx(100.0 + HEARTBEAT_S)


def test_a_queue_that_begins_or_ends_does_not_wait_for_the_pace() -> None:
    engine = Engine()
    news: list[float] = []
    stream = engine.watch(lambda: news.append(engine.now_s))
    stream.on_pace(pb.Pace(min_interval_s=0.5))
    engine.say(stream)
    engine.now_s += 0.1
    engine.queue(0, running=2)
    news.clear()

    engine.queue(1)

    assert news, "whoever waits for the next report has to hear that it is due earlier"
    assert stream.due_s() <= engine.now_s
    assert engine.say(stream)[-1].load.waiting == 1


def test_a_queue_that_comes_and_goes_is_told_early_once_in_each_interval() -> None:
    engine = Engine()
    stream = engine.watch()
    stream.on_pace(pb.Pace(min_interval_s=0.5))
    engine.say(stream)
    said_s = []

    for at in range(100):
        engine.now_s = 100.0 + 0.05 + at * 0.02
        engine.queue((at + 1) % 2)
        if stream.due_s() <= engine.now_s:
            engine.say(stream)
            said_s.append(engine.now_s)

    assert said_s[0] == pytest.approx(100.05)
    assert len(said_s) <= 2 * (2.0 / 0.5) + 1


def test_an_engine_that_drains_says_so_at_once() -> None:
    engine = Engine()
    stream = engine.watch()
    stream.on_pace(pb.Pace(min_interval_s=1.0))
    engine.say(stream)
    engine.now_s += MIN_INTERVAL_S

    engine.hub.announce()

    assert stream.due_s() <= engine.now_s


def test_news_are_announced_once_until_they_are_told() -> None:
    engine = Engine()
    news: list[float] = []
    stream = engine.watch(lambda: news.append(engine.now_s))
    engine.say(stream)

    engine.store(1, running=1)
    engine.store(2, running=2)
    assert len(news) == 1

    engine.say(stream)
    engine.store(3, running=3)
    assert len(news) == 2


def test_changes_that_outgrow_their_bound_become_a_new_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "MAX_PENDING_HASHES", 2)
    engine = Engine()
    stream = engine.watch()
    engine.say(stream)

    engine.store(1, 2, 3)
    events = engine.say(stream)

    assert kinds(events) == ["snapshot_begin", "snapshot_chunk", "snapshot_end", "load"]
    assert [event.seq for event in events] == [4, 5, 6, 7]


def test_what_happens_while_a_snapshot_is_sent_is_told_after_it() -> None:
    engine = Engine()
    engine.store(1)
    stream = engine.watch()

    events = stream.events()
    begun = next(events)
    engine.store(2)
    rest = list(events)

    assert kinds([begun, *rest]) == [
        "snapshot_begin",
        "snapshot_chunk",
        "snapshot_end",
        "blocks",
        "load",
    ]
    assert unpack_hashes(rest[0].snapshot_chunk.hashes) == [b"\1" * 16]
    assert unpack_hashes(rest[2].blocks.stored) == [b"\2" * 16]


def test_only_the_latest_snapshot_s_acknowledgement_makes_the_engine_ready() -> None:
    engine = Engine()
    stream = engine.watch()
    engine.say(stream)

    stream.on_acknowledged(pb.SnapshotAck(epoch=EPOCH, seq=1))
    before = engine.hub.is_ready()
    stream.on_acknowledged(pb.SnapshotAck(epoch=EPOCH, seq=2))

    assert not before
    assert engine.hub.is_ready()
    assert stream.has_news, "the router is told that the engine is ready now"
