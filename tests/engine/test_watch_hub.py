"""What watch streams still have to say, merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoy_engine.messages import BlockEvents
from kvoy_engine.watch import PendingChanges
from kvoy_engine.watch_stream import split_changes

HASHES = st.integers(0, 12).map(lambda i: bytes([i]) * 16)
EVENTS = st.builds(
    BlockEvents, removed=st.lists(HASHES), stored=st.lists(HASHES), cleared=st.booleans()
)


def apply(held: set[bytes], cleared: bool, removed: list[bytes], stored: list[bytes]) -> None:
    if cleared:
        held.clear()
    held.difference_update(removed)
    held.update(stored)


@given(st.sets(HASHES), st.lists(EVENTS), st.integers(1, 5))
def test_merged_and_split_events_say_what_the_single_ones_said(
    start: set[bytes], events: list[BlockEvents], max_hashes: int
) -> None:
    expected, got = set(start), set(start)
    changes = PendingChanges()
    for event in events:
        apply(expected, event.cleared, event.removed, event.stored)
        changes.add(event)

    for delta in split_changes(changes, max_hashes):
        removed = [delta.removed[i : i + 16] for i in range(0, len(delta.removed), 16)]
        stored = [delta.stored[i : i + 16] for i in range(0, len(delta.stored), 16)]
        assert len(removed) + len(stored) <= max_hashes
        apply(got, delta.cleared, removed, stored)

    assert got == expected
