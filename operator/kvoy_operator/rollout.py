"""The next safe step of a rollout: how many replicas each pool has in each revision.

A step is computed from the cluster as observed and from what the status last said, never from a
memory of the operator's own, and names whole counts, never differences: taking it twice, or after a
restart, changes nothing. What it keeps to:

- Ready capacity of a pool does not fall below desired - max_unavailable by a step of ours. Where
  the cluster has room, one replica more than desired is added first and nothing is ever missing.
- Old engines leave only as far as new ones of *every* pool have taken over, so that the pools of a
  revision, which pair only among themselves, move in proportion.
- A revision that comes to a stop leaves the old one at its full count; an old revision that never
  served goes first; the last one that did is kept, at zero if need be, until the new one is
  complete.

`RolloutInput.workloads` must show the operator's own last writes of `spec.replicas`; all else may
be late. Pure: `reconcile` observes, applies the step and writes the status that the next one reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvoy_operator.rollout_counts import (
    Pace,
    counts_as_they_are,
    counts_at,
    pools_without_engines,
)
from kvoy_operator.rollout_situation import Situation, read_situation
from kvoy_operator.rollout_state import PoolRevision
from kvoy_operator.rollout_values import (
    Phase,
    Reported,
    RolloutInput,
    RolloutSettings,
    RolloutStep,
    Strategy,
)
from kvoy_operator.rollout_words import message_of, outage_message

__all__ = [
    "Phase",
    "Reported",
    "RolloutInput",
    "RolloutSettings",
    "RolloutStep",
    "Strategy",
    "plan_rollout",
]

ANNOUNCE_S = 1.0
"""So long until a step that the status must speak of first, such as an outage."""


def plan_rollout(given: RolloutInput) -> RolloutStep:
    """The step to take now; see the module's own words for what it keeps to."""
    here = read_situation(given)
    phase = _phase(here)
    if here.keeper and here.was_reported(Phase.STOPPED) and phase is Phase.ROLLING_OUT:
        # The trial's success must be in the status before the step that uses up its evidence.
        return _step(here, phase, counts_as_they_are(here), ANNOUNCE_S)
    counts = counts_at(here, _pace(here, phase))
    dark = pools_without_engines(here, counts)
    if dark and phase in (Phase.ROLLING_OUT, Phase.REPLACING):
        if not here.was_reported(Phase.OUTAGE_AHEAD, Phase.REPLACING):
            return _step(here, Phase.OUTAGE_AHEAD, counts_as_they_are(here), ANNOUNCE_S, dark)
        phase = Phase.REPLACING
    return _step(here, phase, counts, here.health.recheck_after_s)


def _phase(here: Situation) -> Phase:
    if here.is_complete:
        return Phase.SETTLED
    if not here.given.is_model_ready and here.num_new == 0:
        return Phase.WAITING_FOR_MODEL
    if _is_stopped(here):
        return Phase.STOPPED
    if here.has_old:
        return Phase.REPLACING if _must_replace(here) else Phase.ROLLING_OUT
    is_known = here.given.reported.current == here.given.wanted
    return Phase.SCALING if is_known else Phase.DEPLOYING


def _is_stopped(here: Situation) -> bool:
    """A stop is remembered by the status, since the pods that showed it may be gone; it ends when
    the replicas that were kept on trial have all become ready after all."""
    if here.health.is_stuck:
        return True
    if not (here.keeper and here.was_reported(Phase.STOPPED)):
        return False
    wanted = [pool for pool in here.pools if pool.desired]
    has_trial = any(pool.num_old + pool.new.size > pool.desired for pool in wanted)
    all_ready = all(0 < pool.new.size == pool.new.num_ready for pool in wanted)
    return not (has_trial and all_ready)


def _must_replace(here: Situation) -> bool:
    """Replacing goes on to its end once it was begun: each try for room costs the time limit."""
    settings = here.given.settings
    if settings.strategy is not Strategy.AUTO:
        return settings.strategy is Strategy.REPLACE
    if not settings.max_unavailable:
        return False
    return here.health.has_no_room or here.was_reported(Phase.REPLACING)


def _pace(here: Situation, phase: Phase) -> Pace:
    if phase is Phase.WAITING_FOR_MODEL:
        return Pace(surge=0, missing=0, is_held=True)
    if phase is Phase.STOPPED:
        return Pace(surge=0 if _lacks_room(here) else 1, missing=0, is_held=bool(here.keeper))
    if phase is Phase.REPLACING:
        return Pace(surge=0, missing=max(1, here.given.settings.max_unavailable))
    return Pace(surge=1, missing=0)


def _lacks_room(here: Situation) -> bool:
    """Whether replicas on trial would take the place of old ones that should serve."""
    old_waits = any(
        pod.unscheduled_since_s is not None
        for pod in here.given.pods
        if pod.revision == here.keeper and not pod.is_terminating
    )
    return old_waits or _must_replace(here)


def _step(
    here: Situation,
    phase: Phase,
    counts: Mapping[PoolRevision, int],
    requeue_after_s: float | None,
    dark: tuple[str, ...] = (),
) -> RolloutStep:
    """`dark` are the pools that the status announces to be without engines."""
    given = here.given
    present = {PoolRevision(each.pool, each.revision) for each in given.workloads}
    delete = tuple(key for key in sorted(counts) if _is_deletable(here, key, counts[key]))
    create = tuple(key for key in sorted(counts) if counts[key] and key not in present)
    deleting = {
        PoolRevision(each.pool, each.revision)
        for each in given.workloads
        if each.is_deleting or not each.is_ours
    }
    replicas = {
        key: count
        for key, count in counts.items()
        if (key in present and key not in deleting) or key in create
    }
    current = given.wanted if phase is Phase.SETTLED else given.reported.current or here.keeper
    message = outage_message(given.wanted, dark) if dark else message_of(here, phase)
    return RolloutStep(replicas, create, delete, phase, message, current, requeue_after_s)


def _is_deletable(here: Situation, key: PoolRevision, count: int) -> bool:
    if count or key.revision == here.given.wanted:
        return False
    if key.revision == here.keeper and not here.is_complete:
        return False
    is_empty = not any((pod.pool, pod.revision) == key for pod in here.given.pods)
    return is_empty and any(
        workload.replicas == workload.current_replicas == 0
        and workload.observed_generation >= workload.generation
        for workload in here.given.workloads
        if (workload.pool, workload.revision) == key
    )
