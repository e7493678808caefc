"""What a rollout is decided from, and the step that comes out: values. `rollout` decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvoy_operator.observed import PodView, WorkloadView
from kvoy_operator.rollout_state import PoolRevision


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
    failing: str = ""
    """What is said of pods that end; empty: none do."""
    failing_since_s: float = 0.0


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
