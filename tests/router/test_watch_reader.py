"""Watch events into a pool, without a wire."""

from __future__ import annotations

from random import Random

import pytest

from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_router.endpoint import EngineInfo, Knowledge
from kvoy_router.pool import Pool
from kvoy_router.watch_reader import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Pauses,
    StreamBroken,
    WatchReader,
)

EPOCH = b"epoch"
ID = "engine:8000"
HASH = b"h" * 16


def make_reader() -> tuple[Pool, WatchReader]:
    pool = Pool("router-a")
    pool.add_endpoint(ID)
    pool.on_describe(ID, EngineInfo(epoch=EPOCH, served_model="m"), 0.0)
    return pool, WatchReader(pool, ID, EPOCH)


def snapshot() -> list[pb.WatchEvent]:
    return [
        pb.WatchEvent(seq=1, epoch=EPOCH, snapshot_begin=pb.SnapshotBegin(num_hashes=1)),
        pb.WatchEvent(seq=2, snapshot_chunk=pb.SnapshotChunk(hashes=HASH)),
        pb.WatchEvent(seq=3, snapshot_end=pb.SnapshotEnd()),
    ]


def test_the_end_of_a_snapshot_is_acknowledged_by_its_number() -> None:
    pool, reader = make_reader()

    acks = [reader.take(event, 1.0) for event in snapshot()]

    assert acks == [None, None, pb.SnapshotAck(epoch=EPOCH, seq=3)]
    endpoint = pool.endpoint(ID)
    assert endpoint is not None
    assert endpoint.knowledge is Knowledge.EXACT
    assert pool.index.num_held(endpoint.slot) == 1


def test_a_gap_in_the_numbers_breaks_the_stream() -> None:
    _, reader = make_reader()
    for event in snapshot():
        reader.take(event, 1.0)

    with pytest.raises(StreamBroken, match="gap: event 5 came instead of 4"):
        reader.take(pb.WatchEvent(seq=5, load=pb.LoadReport()), 1.0)


def test_a_snapshot_of_another_epoch_breaks_the_stream() -> None:
    _, reader = make_reader()

    with pytest.raises(StreamBroken, match="restarted"):
        reader.take(pb.WatchEvent(seq=1, epoch=b"new", snapshot_begin=pb.SnapshotBegin()), 1.0)


def test_pauses_double_while_attempts_fail_and_begin_anew_after_success() -> None:
    pauses = Pauses(Random(1))

    failing = [pauses.next_s(was_in_sync=False) for _ in range(12)]
    after = pauses.next_s(was_in_sync=True)

    bounds = [min(FIRST_PAUSE_S * 2 ** (i + 1), LONGEST_PAUSE_S) for i in range(12)]
    assert all(b / 2 <= pause <= b for b, pause in zip(bounds, failing, strict=True))
    assert FIRST_PAUSE_S / 2 <= after <= FIRST_PAUSE_S
