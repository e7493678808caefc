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
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from math import floor

from kvoy_operator.observed import PodView, WorkloadView
from kvoy_operator.rollout_health import Health, judge
from kvoy_operator.rollout_state import Pool, PoolRevision, moved_share, pools_of, shrunk

ANNOUNCE_S = 1.0
"""So long until a step that the status must speak of first, such as an outage."""


class Strategy(StrEnum):
    AUTO = "Auto"
    """Surge while the cluster has room, else replace."""
    SURGE = "Surge"
    """One replica more than desired while rolling out; never fewer."""
    REPLACE = "Replace"
    """Never more than desired; `max_unavailable` fewer while rolling out."""


class Phase(StrEnum):
    """What the service is doing about its revision; the reason of the condition `Progressing`."""

    SETTLED = "Settled"
    DEPLOYING = "Deploying"
    SCALING = "Scaling"
    WAITING_FOR_MODEL = "WaitingForModel"
    ROLLING_OUT = "RollingOut"
    OUTAGE_AHEAD = "OutageAhead"
    REPLACING = "Replacing"
    STOPPED = "ProgressDeadlineExceeded"


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    strategy: Strategy = Strategy.AUTO
    max_unavailable: int = 1
    """Replicas that a pool may lack while it is replaced. With 0, `Auto` never replaces; `Replace`
    cannot do with less than 1."""
    surge_timeout_s: float = 60.0
    """So long a new pod may find no place before the cluster counts as full."""
    progress_deadline_s: float = 2400.0
    """So long a new pod may take from its node to ready."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What the status last said about the rollout."""

    phase: str = ""
    current: str = ""
    """The last revision that was complete; empty: none yet."""
    update: str = ""
    """The revision that `phase` is about."""


@dataclass(frozen=True, slots=True)
class RolloutInput:
    wanted: str
    """The revision that the spec asks for."""
    desired: Mapping[str, int]
    """Replicas by pool; a pool that the service no longer has is missing."""
    workloads: tuple[WorkloadView, ...]
    pods: tuple[PodView, ...]
    settings: RolloutSettings
    now_s: float
    is_model_ready: bool = True
    """Whether the engines would find their model in the cache."""
    reported: Reported = field(default_factory=Reported)


@dataclass(frozen=True, slots=True)
class RolloutStep:
    replicas: Mapping[PoolRevision, int]
    """Of every workload that there is or should be. Those that shrink are written first, so that a
    step that breaks off in the middle never leaves more than desired + 1."""
    create: tuple[PoolRevision, ...]
    """Workloads to make, with their count from `replicas` from the first moment on."""
    delete: tuple[PoolRevision, ...]
    """Workloads of old revisions that are empty and no longer needed."""
    phase: Phase
    message: str
    current: str
    """The last revision that was complete, for the next status."""
    requeue_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Pace:
    surge: int
    missing: int
    is_held: bool = False
    """The new revision does not grow; the old one serves in full."""


@dataclass(frozen=True, slots=True)
class _Situation:
    """All that a step depends on, read once."""

    given: RolloutInput
    pools: tuple[Pool, ...]
    share: Fraction
    """How much of the service the wanted revision serves."""
    health: Health
    keeper: str
    """The old revision to fall back on; empty: none that ever served."""

    @property
    def has_old(self) -> bool:
        return any(pool.num_old for pool in self.pools)

    @property
    def is_complete(self) -> bool:
        return all(pool.is_complete for pool in self.pools)

    @property
    def num_new(self) -> int:
        return sum(pool.new.size for pool in self.pools)

    def was_reported(self, *phases: Phase) -> bool:
        """Whether the status last said one of these of the wanted revision."""
        reported = self.given.reported
        return reported.phase in phases and reported.update == self.given.wanted


def plan_rollout(given: RolloutInput) -> RolloutStep:
    """The step to take now; see the module's own words for what it keeps to."""
    here = _read(given)
    phase = _phase(here)
    if here.keeper and here.was_reported(Phase.STOPPED) and phase is Phase.ROLLING_OUT:
        # The trial's success must be in the status before the step that uses up its evidence.
        return _step(here, phase, _as_it_is(here), ANNOUNCE_S)
    counts = _counts(here, _pace(here, phase))
    dark = _without_engines(here, counts)
    if dark and phase in (Phase.ROLLING_OUT, Phase.REPLACING):
        if not here.was_reported(Phase.OUTAGE_AHEAD, Phase.REPLACING):
            return _step(here, Phase.OUTAGE_AHEAD, _as_it_is(here), ANNOUNCE_S, dark)
        phase = Phase.REPLACING
    return _step(here, phase, counts, here.health.recheck_after_s)


def _read(given: RolloutInput) -> _Situation:
    pools = pools_of(
        given.wanted, given.reported.current, given.desired, given.workloads, given.pods
    )
    keeper = _keeper(pools, given)
    health = judge(
        [pool.new.workload for pool in pools if pool.new.workload],
        [pod for pod in given.pods if pod.revision == given.wanted and pod.pool in given.desired],
        progress_deadline_s=given.settings.progress_deadline_s,
        surge_timeout_s=given.settings.surge_timeout_s,
        is_replacing_old=bool(keeper),
        now_s=given.now_s,
    )
    return _Situation(given, pools, moved_share(pools), health, keeper)


def _keeper(pools: tuple[Pool, ...], given: RolloutInput) -> str:
    """The revision that was complete last, or else the old one that has most to serve with."""
    if given.reported.current == given.wanted:
        return ""
    olds = [old for pool in pools for old in pool.olds]
    if given.reported.current in {old.key.revision for old in olds}:
        return given.reported.current
    serving = [old.key.revision for old in olds if old.may_serve]
    return serving[0] if serving else ""


def _phase(here: _Situation) -> Phase:
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


def _is_stopped(here: _Situation) -> bool:
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


def _must_replace(here: _Situation) -> bool:
    """Replacing goes on to its end once it was begun: each try for room costs the time limit."""
    settings = here.given.settings
    if settings.strategy is not Strategy.AUTO:
        return settings.strategy is Strategy.REPLACE
    if not settings.max_unavailable:
        return False
    return here.health.has_no_room or here.was_reported(Phase.REPLACING)


def _pace(here: _Situation, phase: Phase) -> _Pace:
    if phase is Phase.WAITING_FOR_MODEL:
        return _Pace(surge=0, missing=0, is_held=True)
    if phase is Phase.STOPPED:
        return _Pace(surge=0 if _lacks_room(here) else 1, missing=0, is_held=bool(here.keeper))
    if phase is Phase.REPLACING:
        return _Pace(surge=0, missing=max(1, here.given.settings.max_unavailable))
    return _Pace(surge=1, missing=0)


def _lacks_room(here: _Situation) -> bool:
    """Whether replicas on trial would take the place of old ones that should serve."""
    old_waits = any(
        pod.unscheduled_since_s is not None
        for pod in here.given.pods
        if pod.revision == here.keeper and not pod.is_terminating
    )
    return old_waits or _must_replace(here)


def _counts(here: _Situation, pace: _Pace) -> dict[PoolRevision, int]:
    counts: dict[PoolRevision, int] = {}
    for pool in here.pools:
        keep = _num_to_keep(here, pool, pace)
        olds = _restored(here, pool, keep) if pace.is_held else shrunk(pool.olds, keep)
        counts |= olds
        counts[pool.new.key] = _num_new(here, pool, pace, sum(olds.values()))
    return counts


def _num_to_keep(here: _Situation, pool: Pool, pace: _Pace) -> int:
    """Replicas of old revisions that the pool cannot do without."""
    if not pool.is_wanted:
        # Old engines keep the partners that they pair with until the others have all moved.
        return 0 if here.share == 1 or pace.missing else pool.num_old
    return max(0, pool.desired - floor(here.share * pool.desired) - pace.missing)


def _restored(here: _Situation, pool: Pool, keep: int) -> dict[PoolRevision, int]:
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


def _num_new(here: _Situation, pool: Pool, pace: _Pace, num_old: int) -> int:
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


def _without_engines(here: _Situation, counts: Mapping[PoolRevision, int]) -> tuple[str, ...]:
    """Pools that serve now and would have no ready replica after the step."""
    dark = []
    for pool in here.pools:
        rows = (pool.new, *pool.olds)
        before = sum(row.num_ready for row in rows)
        after = sum(row.ready_after(counts[row.key]) for row in rows)
        if pool.desired and before and not after:
            dark.append(pool.name)
    return tuple(dark)


def _as_it_is(here: _Situation) -> dict[PoolRevision, int]:
    return {row.key: row.size for pool in here.pools for row in (pool.new, *pool.olds)}


def _step(
    here: _Situation,
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
    message = _outage(given.wanted, dark) if dark else _message(here, phase)
    return RolloutStep(replicas, create, delete, phase, message, current, requeue_after_s)


def _is_deletable(here: _Situation, key: PoolRevision, count: int) -> bool:
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


def _message(here: _Situation, phase: Phase) -> str:
    wanted = here.given.wanted
    ready = ", ".join(
        f"{pool.name} {pool.new.num_ready} of {pool.desired}"
        for pool in here.pools
        if pool.is_wanted
    )
    match phase:
        case Phase.SETTLED:
            return f"Revision {wanted} is complete: {ready} ready."
        case Phase.WAITING_FOR_MODEL:
            return f"Revision {wanted} waits until its model is in the cache."
        case Phase.STOPPED:
            return f"Revision {wanted} makes no progress ({ready} ready){_stopped_by(here)}"
        case Phase.ROLLING_OUT if here.health.has_no_room:
            return (
                f"Revision {wanted} ({ready} ready) finds no room for one engine more, and the "
                f"rollout may not do with one less: add room, or change rollout.strategy or "
                f"rollout.maxUnavailable."
            )
        case Phase.REPLACING:
            return f"Revision {wanted} replaces engines in their place: {ready} ready."
        case _:
            return f"Revision {wanted}: {ready} ready."


def _outage(wanted: str, dark: tuple[str, ...]) -> str:
    pools = " and ".join(dark)
    return (
        f"Revision {wanted} can only replace what serves now: {pools} will have no ready engine "
        f"until the new one has loaded."
    )


def _stopped_by(here: _Situation) -> str:
    shown = f" because of {here.health.stuck_subject}" if here.health.stuck_subject else ""
    if not here.keeper:
        return f"{shown}."
    return f"{shown}; revision {here.keeper} goes on serving. Edit the spec to try again."
