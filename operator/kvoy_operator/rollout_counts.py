"""How many replicas each pool has in each revision, at a given pace. Pure.

Old replicas are kept as far as new ones do not serve in their place yet; new ones fill what is left
of the desired count and the surge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor

from kvoy_operator.rollout_situation import Situation
from kvoy_operator.rollout_state import Pool, PoolRevision, shrunk


@dataclass(frozen=True, slots=True)
class Pace:
    """What a pool may have more and less than desired while it moves."""

    surge: int
    missing: int
    is_held: bool = False
    """The new revision does not grow; the old one serves in full."""


def counts_at(here: Situation, pace: Pace) -> dict[PoolRevision, int]:
    """Of every workload that there is, and of those that the wanted revision should have."""
    counts: dict[PoolRevision, int] = {}
    for pool in here.pools:
        keep = _num_to_keep(here, pool, pace)
        olds = _restored(here, pool, keep) if pace.is_held else shrunk(pool.olds, keep)
        counts |= olds
        counts[pool.new.key] = _num_new(here, pool, pace, sum(olds.values()))
    return counts


def _num_to_keep(here: Situation, pool: Pool, pace: Pace) -> int:
    """Replicas of old revisions that the pool cannot do without."""
    if not pool.is_wanted:
        # Old engines keep the partners that they pair with until the others have all moved.
        return 0 if here.share == 1 or pace.missing else pool.num_old
    return max(0, pool.desired - floor(here.share * pool.desired) - pace.missing)


def _restored(here: Situation, pool: Pool, keep: int) -> dict[PoolRevision, int]:
    """Brings old revisions back to what must be kept, scaling up the one to fall back on where it
    was taken down. That is not scaled down for a trial that succeeds, which shows by being one too
    many."""
    sizes = shrunk(pool.olds, keep)
    keeper = next((old for old in pool.olds if old.key.revision == here.keeper), None)
    if keeper is not None:
        others = sum(sizes.values()) - sizes[keeper.key]
        size = max(keep - others, min(keeper.size, pool.desired - others))
        sizes[keeper.key] = max(sizes[keeper.key], size)
    return sizes


def _num_new(here: Situation, pool: Pool, pace: Pace, num_old: int) -> int:
    room = max(0, pool.desired + pace.surge - num_old)
    moved = floor(here.share * pool.desired)
    serving = pool.new.smallest_keeping(moved)
    if pace.is_held:
        return min(pool.new.size, pool.desired, max(serving, room))
    # The next replica always comes: replicas of an old group workload that cannot be taken out of
    # its middle must not hold the rollout for ever.
    due = moved + pace.surge + pace.missing if num_old else pool.desired
    # What has begun is not taken back, but in a full cluster it may hold another pool's place.
    begun = pool.new.size if pace.surge else serving
    return min(pool.desired, max(room, begun, due))


def pools_without_engines(here: Situation, counts: Mapping[PoolRevision, int]) -> tuple[str, ...]:
    """Pools that serve now and would have no ready replica after the step."""
    dark = []
    for pool in here.pools:
        rows = (pool.new, *pool.olds)
        before = sum(row.num_ready for row in rows)
        after = sum(row.ready_after(counts[row.key]) for row in rows)
        if pool.desired and before and not after:
            dark.append(pool.name)
    return tuple(dark)


def counts_as_they_are(here: Situation) -> dict[PoolRevision, int]:
    """For a step that only reports."""
    return {row.key: row.size for pool in here.pools for row in (pool.new, *pool.olds)}
