"""The replicas of a router: which take requests, and how one comes in the place of another."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from kvoy_router.policies import Policy
from kvoy_router.pool import Pool
from kvoy_simulate.link import TelemetryLink
from kvoy_simulate.router import VirtualRouter

if TYPE_CHECKING:
    from kvoy_simulate.fleet import Fleet

READY_WAIT_S = 15.0
"""After so long a new router is ready, whatever its engines say."""
READY_POLL_S = 0.05

PolicyMaker = Callable[[Random], Policy]


class Replicas:
    def __init__(
        self,
        fleet: Fleet,
        make_policy: PolicyMaker,
        on_link: Callable[[VirtualRouter, str, TelemetryLink], None],
    ) -> None:
        self._fleet = fleet
        self._clock = fleet.clock
        self._make_policy = make_policy
        self._on_link = on_link
        self._serving: list[VirtualRouter | None] = []
        """Those that take requests, by position; None: none does now."""
        self._others: list[VirtualRouter] = []
        """Live ones that take none yet, or none any more."""
        self._gone: list[VirtualRouter] = []
        self._num_routers = 0
        self.policy_name = ""

    def start(self, count: int) -> None:
        """All replicas at once, taking requests."""
        for position in range(count):
            self._serving.append(self._make_router(position))

    @property
    def live(self) -> list[VirtualRouter]:
        return [*(router for router in self._serving if router is not None), *self._others]

    def choose(self, random: Random) -> VirtualRouter | None:
        """The one that a client's connection falls to; None while none is ready."""
        serving = [router for router in self._serving if router is not None]
        if len(serving) > 1:
            return random.choice(serving)
        return serving[0] if serving else None

    @property
    def num_picks(self) -> int:
        return sum(router.num_picks for router in [*self.live, *self._gone])

    @property
    def num_events(self) -> int:
        """Telemetry events read."""
        return sum(router.num_events for router in [*self.live, *self._gone])

    def roll(self, position: int, grace_s: float) -> None:
        """The old one serves until the new one is ready, and then has `grace_s` for its streams."""
        old = self._serving[position]
        if old is None:
            return

        def take_over(new: VirtualRouter) -> None:
            if self._serving[position] is old:
                self._serving[position] = new
                self._others.append(old)
                self._leave_when_idle(old, self._clock.now_s + grace_s)
            else:  # killed or replaced meanwhile
                new.kill()
                self._gone.append(new)

        self._bring_up(position, take_over)

    def kill(self, position: int, down_s: float) -> None:
        """Its streams break at once; a new process begins `down_s` later."""
        old = self._serving[position]
        if old is None:
            return
        self._serving[position] = None
        old.kill()
        self._gone.append(old)

        def take_over(new: VirtualRouter) -> None:
            self._serving[position] = new

        self._clock.after(down_s, self._bring_up, position, take_over)

    def _make_router(self, position: int) -> VirtualRouter:
        """A new process that knows nothing, and looks for all engines."""
        fleet, scenario = self._fleet, self._fleet.scenario
        self._num_routers += 1
        name = f"router-{self._num_routers}"
        random = fleet.random(f"{name}/policy")
        policy = self._make_policy(random)
        self.policy_name = policy.name
        pool = Pool(name, policy, config=scenario.pool, random=random)
        stride = scenario.engines[0].core.hash_stride
        router = VirtualRouter(
            fleet, position, pool, stride, fleet.random(f"{name}/pauses"), self._on_link
        )
        for address in fleet.addresses:
            router.add_engine(address)
            engine = fleet.engines.get(address)
            router.pool.set_draining(address, engine is not None and engine.is_draining)
        return router

    def _bring_up(self, position: int, on_ready: Callable[[VirtualRouter], None]) -> None:
        """Start a router; it is ready once it knows its engines, or after a while without."""
        router = self._make_router(position)
        self._others.append(router)
        give_up_s = self._clock.now_s + READY_WAIT_S

        def look() -> None:
            if not router.knows_its_engines and self._clock.now_s < give_up_s:
                self._clock.after(READY_POLL_S, look)
            else:
                self._others.remove(router)
                on_ready(router)

        look()

    def _leave_when_idle(self, router: VirtualRouter, until_s: float) -> None:
        if router.num_open and self._clock.now_s < until_s:
            self._clock.after(READY_POLL_S, self._leave_when_idle, router, until_s)
            return
        router.kill()
        self._others.remove(router)
        self._gone.append(router)
