"""All that the next step of a rollout depends on, read once from its input. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvoy_operator.rollout_health import Health, judge
from kvoy_operator.rollout_state import Pool, moved_share, pools_of
from kvoy_operator.rollout_values import Phase, RolloutInput


@dataclass(frozen=True, slots=True)
class Situation:
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


def read_situation(given: RolloutInput) -> Situation:
    pools = pools_of(
        given.wanted, given.reported.current, given.desired, given.workloads, given.pods
    )
    keeper = _keeper(pools, given)
    workloads = [pool.new.workload for pool in pools if pool.new.workload]
    is_new_failing = any(workload.name in given.reported.failing for workload in workloads)
    health = judge(
        workloads,
        [pod for pod in given.pods if pod.revision == given.wanted and pod.pool in given.desired],
        progress_deadline_s=given.settings.progress_deadline_s,
        surge_timeout_s=given.settings.surge_timeout_s,
        is_replacing_old=bool(keeper),
        failing_since_s=given.reported.failing_since_s if is_new_failing else None,
        now_s=given.now_s,
    )
    return Situation(given, pools, moved_share(pools), health, keeper)


def _keeper(pools: tuple[Pool, ...], given: RolloutInput) -> str:
    """The revision that was complete last, or else the old one that has most to serve with."""
    if given.reported.current == given.wanted:
        return ""
    olds = [old for pool in pools for old in pool.olds]
    if given.reported.current in {old.key.revision for old in olds}:
        return given.reported.current
    serving = [old.key.revision for old in olds if old.may_serve]
    return serving[0] if serving else ""
