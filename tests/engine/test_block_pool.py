"""The block pool: sharing, eviction, events, and random operations against a plain model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoy_contract.blocks import BlockHash, block_hashes, seed_hash
from kvoy_engine.block_pool import NO_BLOCK, BlockId, BlockPool, OutOfBlocks
from kvoy_engine.messages import BlockEvents

SEED = seed_hash("model")


def hashes_of(*values: int) -> list[BlockHash]:
    """The chain of one-token blocks."""
    return block_hashes(SEED, values, 1)


def fill(pool: BlockPool, *values: int) -> list[BlockId]:
    """The table of a sequence that computed and registered all its one-token blocks."""
    hashes = hashes_of(*values)
    table = pool.find_prefix(hashes, len(hashes))
    pool.acquire(table)
    parent = table[-1] if table else NO_BLOCK
    for block_hash in hashes[len(table) :]:
        parent = pool.register(pool.allocate(1)[0], block_hash, parent)
        table.append(parent)
    return table


def apply(known: set[bytes], events: BlockEvents) -> None:
    if events.cleared:
        known.clear()
    known.difference_update(events.removed)
    known.update(events.stored)


def test_a_registered_prefix_is_found_as_far_as_it_goes() -> None:
    pool = BlockPool(8)

    table = fill(pool, 1, 2, 3)

    assert pool.find_prefix(hashes_of(1, 2, 3, 4), 4) == table
    assert pool.find_prefix(hashes_of(1, 2, 9), 3) == table[:2]
    assert pool.find_prefix(hashes_of(1, 2, 3), 2) == table[:2]
    assert pool.find_prefix(hashes_of(2, 3), 2) == []


def test_a_released_block_stays_findable_until_it_is_evicted() -> None:
    pool = BlockPool(4)
    table = fill(pool, 1, 2, 3)

    pool.release(table)
    assert (pool.num_free, pool.num_evictable, pool.num_available) == (1, 3, 4)
    assert pool.find_prefix(hashes_of(1, 2, 3), 3) == table

    pool.allocate(2)
    assert pool.find_prefix(hashes_of(1, 2, 3), 3) == table[:2]
    pool.check_integrity()


def test_the_least_recently_used_work_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, new = fill(pool, 1, 2), fill(pool, 3, 4)
    pool.release(old)
    pool.release(new)
    again = fill(pool, 1, 2)
    pool.release(again)

    pool.allocate(2)

    assert pool.find_prefix(hashes_of(1, 2), 2) == old
    assert pool.find_prefix(hashes_of(3, 4), 2) == []


def test_an_unregistered_block_is_free_as_soon_as_it_is_released() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)

    pool.release(blocks)

    assert (pool.num_free, pool.num_evictable) == (2, 0)


def test_more_than_there_is_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.release(fill(pool, 1, 2))

    with pytest.raises(OutOfBlocks, match="4 blocks wanted, 3 available"):
        pool.allocate(4)

    assert len(pool.find_prefix(hashes_of(1, 2), 2)) == 2
    pool.check_integrity([])


def test_two_blocks_of_equal_content_become_one() -> None:
    pool = BlockPool(4)
    [first], [second] = pool.allocate(1), pool.allocate(1)
    [block_hash] = hashes_of(1)

    assert pool.register(first, block_hash, NO_BLOCK) == first
    assert pool.register(second, block_hash, NO_BLOCK) == first

    assert pool.num_free == 3
    pool.check_integrity([[first], [first]])


def test_only_hashes_at_the_end_of_a_stride_are_reported() -> None:
    pool = BlockPool(8, blocks_per_stride=3)

    fill(pool, 1, 2, 3, 4, 5, 6, 7)

    chain = hashes_of(1, 2, 3, 4, 5, 6, 7)
    assert pool.drain_events() == BlockEvents(stored=[chain[2], chain[5]])
    assert pool.reported_hashes() == [chain[2], chain[5]]
    assert not pool.drain_events()


def test_work_that_comes_and_goes_between_two_drains_leaves_no_event() -> None:
    pool = BlockPool(1)
    pool.release(fill(pool, 1))
    pool.release(pool.allocate(1))
    assert not pool.drain_events()

    pool.release(fill(pool, 1))
    assert pool.drain_events().stored == hashes_of(1)
    pool.release(pool.allocate(1))
    pool.release(fill(pool, 1))
    assert not pool.drain_events()


def test_a_reset_reports_cleared_and_what_is_still_in_use() -> None:
    pool = BlockPool(8)
    used = fill(pool, 1, 2)
    pool.release(fill(pool, 3, 4))
    pool.drain_events()

    pool.reset()

    assert pool.drain_events() == BlockEvents(cleared=True, stored=[*hashes_of(1, 2)])
    assert (pool.num_free, pool.num_evictable) == (6, 0)
    pool.check_integrity([used])


def test_broken_work_is_forgotten_from_the_end_as_far_as_nobody_else_has_it() -> None:
    pool = BlockPool(8)
    shared, broken = fill(pool, 1, 2), fill(pool, 1, 2, 3, 4)

    pool.forget(broken)

    assert pool.find_prefix(hashes_of(1, 2, 3, 4), 4) == shared
    assert pool.reported_hashes() == hashes_of(1, 2)
    pool.check_integrity([shared, broken])
    pool.release(broken)
    assert pool.num_free == 6


@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_random_operations_keep_every_invariant(seed: int, num_blocks: int, stride: int) -> None:
    """Tables share prefixes over an alphabet of two; events always add up to what is reported."""
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, stride)
    tables: list[list[BlockId]] = []
    loose: list[list[BlockId]] = []
    known: set[bytes] = set()

    for _ in range(rng.randrange(1, 120)):
        operation = rng.choice(["fill", "fill", "loose", "release", "forget", "reset", "drain"])
        if operation == "fill" and pool.num_available:
            values = [rng.randrange(2) for _ in range(rng.randrange(1, pool.num_available + 1))]
            tables.append(fill(pool, *values))
        elif operation == "loose":
            loose.append(pool.allocate(rng.randrange(pool.num_available + 1)))
        elif operation == "release" and (tables or loose):
            kind = rng.choice([kind for kind in (tables, loose) if kind])
            pool.release(kind.pop(rng.randrange(len(kind))))
        elif operation == "forget" and tables:
            broken = tables.pop(rng.randrange(len(tables)))
            pool.forget(broken)
            pool.release(broken)
        elif operation == "reset" and rng.random() < 0.2:
            pool.reset()
        elif operation == "drain":
            apply(known, pool.drain_events())
            assert known == set(pool.reported_hashes())
        pool.check_integrity([*tables, *loose])

    for table in [*tables, *loose]:
        pool.release(table)
    assert pool.num_available == num_blocks
    apply(known, pool.drain_events())
    assert known == set(pool.reported_hashes())
    pool.check_integrity([])
