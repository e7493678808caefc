"""What is simulated: engines, routers, the ways between them, and what happens to them.

Values alone. The parts that serve are described by their own configuration (`CoreConfig`,
`TimingModel`, `PoolConfig`), so a scenario can say exactly what a deployment can. Times are virtual
seconds since the simulation's start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvoy_engine.core_config import CoreConfig
from kvoy_engine.timing_model import TimingModel
from kvoy_router.flow_ticket import FlowLimits
from kvoy_router.pool import PoolConfig
from kvoy_simulate.traffic import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """Engines of one kind. Their names are `{name}-0`, `{name}-1`, ..."""

    name: str
    count: int
    core: CoreConfig
    step: TimingModel = field(default_factory=TimingModel)
    speed: float = 1.0
    """All of its steps are so many times as fast as `step` says."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name of an engine group must not be empty")
        if self.count < 0:
            raise ValueError(f"count of {self.name} must be at least 0, not {self.count}")
        if not 0 < self.speed < math.inf:
            raise ValueError(f"speed of {self.name} must be above 0, not {self.speed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Delays between the parts, in seconds one way."""

    client_s: float = 0.0005
    """Client and router."""
    request_s: float = 0.001
    """Router and engine: a request on its way in, a token on its way back."""
    telemetry_s: float = 0.001
    """Engine to router, in order, and an acknowledgement back."""
    pick_s: float = 0.0005
    """What a router does before it chooses: parsing, encoding, hashing."""

    def __post_init__(self) -> None:
        for name in ("client_s", "request_s", "telemetry_s", "pick_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDies:
    """Its process ends at once: connections break, its cache is gone."""

    at_s: float
    engine: str
    restart_after_s: float | None = None
    """A new process at the same address, empty and of a new epoch; None: it stays away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHangs:
    """No step, no token and no telemetry, and connections stay open; then it goes on."""

    at_s: float
    engine: str
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlows:
    """Its steps take `factor` times as long."""

    at_s: float
    engine: str
    factor: float
    for_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryLost:
    """Telemetry streams break, and none can be opened until the end; requests pass."""

    at_s: float
    for_s: float
    engines: tuple[str, ...] = ()
    """Empty: of all."""
    routers: tuple[int, ...] = ()
    """Positions 0, 1, ...; empty: to all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRestarts:
    """A new router, which knows nothing, comes in the place of one replica.

    Rolled: the old one serves until the new one is ready, then finishes its streams within
    `grace_s`. Killed: its streams break at once, and the new one is ready `down_s` later at the
    earliest.
    """

    at_s: float
    router: int
    grace_s: float = 30.0
    is_killed: bool = False
    down_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
    """`count` more engines of a group, empty, loaded `load_s` later."""

    at_s: float
    group: str
    count: int
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown:
    """The group's last `count` engines drain and end; streams left after `grace_s` break."""

    at_s: float
    group: str
    count: int
    grace_s: float = 600.0


Event = (
    EngineDies | EngineHangs | EngineSlows | TelemetryLost | RouterRestarts | ScaleUp | ScaleDown
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    engines: tuple[EngineGroup, ...]
    workload: Callable[[int], Workload]
    """A fresh one for a seed."""
    duration_s: float
    """Requests that arrive from then on are left out; those before are followed to their end."""
    warmup_s: float = 0.0
    """Begin of the time that is measured; for whoever reads the outcome."""
    drain_s: float = 600.0
    """After `duration_s` the simulation ends at the latest after so long; what is still open then
    has the status UNFINISHED."""
    routers: int = 1
    ways: Ways = field(default_factory=Ways)
    pool: PoolConfig = field(default_factory=PoolConfig)
    events: tuple[Event, ...] = ()
    max_retries: int = 2
    """Further engines that a router tries for a request of whose answer nothing has come."""
    max_resumes: int = 2
    """Further engines that go on with a stream."""
    hang_timeout_s: float = 3.0
    """Without a heartbeat for so long, or in a step of so long at least, an engine hangs."""
    retry_share: float = 0.2
    """Retries, and likewise resumes, for each request."""
    retry_burst: int = 1024
    """Of them, those that may come at once."""
    flow: FlowLimits | None = field(default_factory=FlowLimits)
    """Flow control in every router; None: requests go to engines at once."""
    sample_s: float = 0.5
    """Between two samples of each engine's load."""

    def __post_init__(self) -> None:
        if not self.engines:
            raise ValueError("engines must name at least one group")
        names = [group.name for group in self.engines]
        if len(set(names)) < len(names):
            raise ValueError(f"engines: group names must differ: {', '.join(names)}")
        for name in ("duration_s", "sample_s", "hang_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("warmup_s", "drain_s", "max_retries", "max_resumes", "retry_burst"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.routers < 1:
            raise ValueError(f"routers must be at least 1, not {self.routers}")
        if len({group.core.hash_stride for group in self.engines}) > 1:
            raise ValueError("hash_stride must be the same for all engines of a model")
        for event in self.events:
            self._check(event)

    def _check(self, event: Event) -> None:
        """Raises ValueError when an event names what is not there."""
        kind = type(event).__name__
        if event.at_s < 0:
            raise ValueError(f"{kind}: at_s must be at least 0, not {event.at_s}")
        groups = [group.name for group in self.engines]
        if isinstance(event, ScaleUp | ScaleDown):
            if event.group not in groups:
                raise ValueError(f"{kind}: no group is called {event.group!r}: {', '.join(groups)}")
            if event.count < 1:
                raise ValueError(f"{kind}: count must be at least 1, not {event.count}")
        if isinstance(event, EngineSlows) and not 0 < event.factor < math.inf:
            raise ValueError(f"{kind}: factor must be above 0, not {event.factor}")
        if isinstance(event, EngineHangs | EngineSlows | TelemetryLost) and event.for_s <= 0:
            raise ValueError(f"{kind}: for_s must be above 0, not {event.for_s}")
        engines: tuple[str, ...] = ()
        if isinstance(event, EngineDies | EngineHangs | EngineSlows):
            engines = (event.engine,)
        elif isinstance(event, TelemetryLost):
            engines = event.engines
        for engine in engines:
            name, _, number = engine.rpartition("-")
            if name not in groups or not number.isdecimal():
                raise ValueError(f"{kind}: engines are called GROUP-NUMBER, not {engine!r}")
        routers: tuple[int, ...] = ()
        if isinstance(event, RouterRestarts):
            routers = (event.router,)
        elif isinstance(event, TelemetryLost):
            routers = event.routers
        for router in routers:
            if not 0 <= router < self.routers:
                raise ValueError(f"{kind}: router must be in 0 .. {self.routers - 1}, not {router}")
