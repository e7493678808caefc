"""A fleet in virtual time: engines, routers, clients and mishaps, from a scenario to an outcome.

The parts that decide are those that serve: `EngineCore` with its scheduler and block pool, the
telemetry hub and its streams, and on the router's side the stream's reader and the `Pool` with its
policy, index and leases. Here are only the ways between them, the loops that drive them and who
asks for what. One scenario, policy and seed give one outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from kvoy_router.policies import Policy
from kvoy_router.pool import Pool
from kvoy_simulate.baselines import policy_maker
from kvoy_simulate.clock import VirtualClock
from kvoy_simulate.engine import VirtualEngine
from kvoy_simulate.job import Job
from kvoy_simulate.mishaps import Mishaps
from kvoy_simulate.outcome import Outcome, Status
from kvoy_simulate.recorder import Recorder
from kvoy_simulate.router import VirtualRouter
from kvoy_simulate.scenario import EngineGroup, Scenario
from kvoy_simulate.traffic import SimRequest

START_S = -1.0
"""Engines and routers start before the first request, in time to know each other."""
SETTLE_S = 1.0
"""After the last request's end, for what is still on its way."""
READY_WAIT_S = 15.0
"""After so long a new router is ready, whatever its engines say."""
READY_POLL_S = 0.05

PolicyMaker = Callable[[Random], Policy]


def run(scenario: Scenario, *, policy: str | PolicyMaker, seed: int) -> Outcome:
    """Simulate to the last request's end. Raises ValueError for an unknown policy or a scenario
    whose events name unknown engines."""
    fleet = Fleet(scenario, policy, seed)
    fleet.run()
    return fleet.outcome()


class Fleet:
    """One simulation. `run` uses it up."""

    def __init__(self, scenario: Scenario, policy: str | PolicyMaker, seed: int) -> None:
        self.scenario = scenario
        self.clock = VirtualClock(START_S)
        self.recorder = Recorder()
        self.engines: dict[str, VirtualEngine] = {}
        """The live process at each address."""
        self._serving: list[VirtualRouter | None] = []
        """Those that take requests, by replica; None: none does now."""
        self.addresses: list[str] = []
        """Where discovery sees engines."""
        self._seed = seed
        self._make_policy = policy_maker(policy) if isinstance(policy, str) else policy
        self._num_started = 0
        self._num_routers = 0
        self._others: list[VirtualRouter] = []
        """Live ones that take none yet, or none any more."""
        self._gone: list[VirtualRouter] = []
        self._ended: list[VirtualEngine] = []
        self._balance = self.random("clients")
        self._workload = scenario.workload(seed)
        self._arrivals: Iterator[SimRequest] = iter(self._workload.start())
        self._num_expected = 0
        """Requests that are known to come."""
        self._mishaps = Mishaps(self)
        for group in scenario.engines:
            for number in range(group.count):
                self.start_engine(f"{group.name}-{number}", group)
        for position in range(scenario.routers):
            self._serving.append(self._make_router(position))

    def engine_at(self, address: str) -> VirtualEngine | None:
        """The process that answers there now, if one does."""
        return self.engines.get(address)

    @property
    def live_routers(self) -> list[VirtualRouter]:
        return [*(router for router in self._serving if router is not None), *self._others]

    def random(self, concern: str) -> Random:
        """A stream of its own for each concern, so that one does not shift another."""
        return Random(f"{self._seed}/{concern}")

    # Running

    def run(self) -> None:
        scenario, clock = self.scenario, self.clock
        self._mishaps.schedule(scenario.events)
        clock.at(0.0, self._sample)
        self._expect_next()
        clock.run(scenario.duration_s)
        clock.run(scenario.duration_s + scenario.drain_s, self._is_quiet)
        for router in self.live_routers:
            router.cut(Status.UNFINISHED)
        clock.run(clock.now_s + SETTLE_S)
        self.check_integrity()

    def _is_quiet(self) -> bool:
        return not self.recorder.num_open and not self._num_expected

    def check_integrity(self) -> None:
        """Every invariant of every live part, and that nothing is held by nobody."""
        for engine in self.engines.values():
            engine.core.check_integrity()
        for router in self.live_routers:
            router.check_integrity()

    def outcome(self) -> Outcome:
        scenario, recorder = self.scenario, self.recorder
        engines = [*self.engines.values(), *self._ended]
        routers = [*self.live_routers, *self._gone]
        loads = [engine.core.load() for engine in engines]
        counters = {
            "actions": self.clock.num_done,
            "steps": sum(engine.num_steps for engine in engines),
            "preemptions": sum(load.num_preemptions for load in loads),
            "generated_tokens": sum(load.generated_tokens for load in loads),
            "prompt_tokens": sum(load.prompt_tokens for load in loads),
            "cached_tokens": sum(load.cached_tokens for load in loads),
            "picks": sum(router.num_picks for router in routers),
            "telemetry_events": sum(router.num_events for router in routers),
        }
        return Outcome(
            policy=routers[0].pool.policy.name,
            seed=self._seed,
            duration_s=scenario.duration_s,
            warmup_s=scenario.warmup_s,
            ended_s=self.clock.now_s,
            requests=recorder.requests,
            engines=tuple(recorder.series),
            names=tuple(recorder.names),
            counters=counters,
        )

    def _sample(self) -> None:
        now_s = self.clock.now_s
        for engine in self.engines.values():
            self.recorder.sample(engine, now_s)
        self.clock.after(self.scenario.sample_s, self._sample)

    # Engines

    def start_engine(self, name: str, group: EngineGroup) -> None:
        """A new process, loaded and empty, at the address that has its name."""
        self._num_started += 1
        epoch = self._num_started.to_bytes(16, "little")
        request_s = self.scenario.ways.request_s
        engine = VirtualEngine(self.clock, name, group, epoch, request_s, self._end_drained)
        self.engines[name] = engine
        self.recorder.on_engine_start(engine, self.clock.now_s)
        if name not in self.addresses:
            self.addresses.append(name)
            for router in self.live_routers:
                router.add_engine(name)

    def end_engine(self, name: str) -> None:
        """Its process is gone: connections and telemetry break."""
        engine = self.engines.pop(name)
        self._ended.append(engine)
        self.recorder.on_engine_end(engine, self.clock.now_s)
        ways = self.scenario.ways
        for attempt in engine.end():
            self.clock.after(ways.request_s, attempt.job.router.on_broken, attempt)
        for router in self.live_routers:
            if (link := router.links.get(name)) is not None:
                self.clock.after(ways.telemetry_s, link.on_broken, engine)

    def restart_engine(self, name: str, group: EngineGroup) -> None:
        if name not in self.engines and name in self.addresses:
            self.start_engine(name, group)

    def drain_engine(self, name: str, grace_s: float) -> None:
        """Discovery sees that it is to go; it goes when it is idle or the grace is over."""
        engine = self.engines[name]
        for router in self.live_routers:
            router.pool.set_draining(name, True)
        engine.drain()
        self.clock.after(grace_s, self._end_drained, engine)

    def _end_drained(self, engine: VirtualEngine) -> None:
        if self.engines.get(engine.name) is not engine:
            return
        self.end_engine(engine.name)
        self.addresses.remove(engine.name)
        for router in self.live_routers:
            self.clock.after(self.scenario.ways.telemetry_s, router.remove_engine, engine.name)

    # Routers

    def roll_router(self, position: int, grace_s: float) -> None:
        """The old one serves until the new one is ready, and then has `grace_s` for its streams."""
        old = self._serving[position]
        if old is None:
            return

        def take_over(new: VirtualRouter) -> None:
            if self._serving[position] is old:
                self._serving[position] = new
                self._others.append(old)
                self._leave_when_idle(old, self.clock.now_s + grace_s)
            else:
                self._leave_when_idle(new, self.clock.now_s)

        self._bring_up(position, take_over)

    def kill_router(self, position: int, down_s: float) -> None:
        """Its streams break at once; a new process begins `down_s` later."""
        old = self._serving[position]
        if old is None:
            return
        self._serving[position] = None
        old.kill()
        self._gone.append(old)

        def take_over(new: VirtualRouter) -> None:
            self._serving[position] = new

        self.clock.after(down_s, self._bring_up, position, take_over)

    def _make_router(self, position: int) -> VirtualRouter:
        """A new process that knows nothing, and looks for all engines."""
        scenario = self.scenario
        self._num_routers += 1
        name = f"router-{self._num_routers}"
        random = self.random(f"{name}/policy")
        pool = Pool(name, self._make_policy(random), config=scenario.pool, random=random)
        stride = scenario.engines[0].core.hash_stride
        router = VirtualRouter(
            self, position, pool, stride, self.random(f"{name}/pauses"), self._mishaps.on_link
        )
        for address in self.addresses:
            router.add_engine(address)
            engine = self.engines.get(address)
            router.pool.set_draining(address, engine is not None and engine.is_draining)
        return router

    def _bring_up(self, position: int, on_ready: Callable[[VirtualRouter], None]) -> None:
        """Start a router; it is ready once it knows its engines, or after a while without."""
        router = self._make_router(position)
        self._others.append(router)
        give_up_s = self.clock.now_s + READY_WAIT_S

        def look() -> None:
            if not router.knows_its_engines and self.clock.now_s < give_up_s:
                self.clock.after(READY_POLL_S, look)
            else:
                self._others.remove(router)
                on_ready(router)

        look()

    def _leave_when_idle(self, router: VirtualRouter, until_s: float) -> None:
        if router.num_open and self.clock.now_s < until_s:
            self.clock.after(READY_POLL_S, self._leave_when_idle, router, until_s)
            return
        router.kill()
        self._others.remove(router)
        self._gone.append(router)

    # Clients

    def _expect_next(self) -> None:
        """Look one request ahead into the open loop."""
        request = next(self._arrivals, None)
        if request is not None:
            self._expect(request, self._expect_next)

    def _expect(self, request: SimRequest, then: Callable[[], None] | None = None) -> None:
        if request.arrival_s < self.scenario.duration_s:
            self._num_expected += 1
            self.clock.at(request.arrival_s, self._arrive, request, then)

    def _arrive(self, request: SimRequest, then: Callable[[], None] | None) -> None:
        self._num_expected -= 1
        serving = [router for router in self._serving if router is not None]
        if serving:
            router = self._balance.choice(serving) if len(serving) > 1 else serving[0]
            job = Job(self.recorder.add(request, router.position), request, router)
            ways = self.scenario.ways
            self.clock.after(ways.client_s + ways.pick_s, router.begin, job)
        else:
            row = self.recorder.add(request, -1)
            self.recorder.on_end(row, Status.REFUSED, 0, self.clock.now_s)
        if then is not None:
            then()

    # What routers tell; see `router.JobSink`

    def on_sent(self, job: Job, engine: str, predicted_tokens: int, now_s: float) -> None:
        self.recorder.on_sent(job, engine, predicted_tokens, now_s)

    def on_first_token(self, job: Job, cached_tokens: int, now_s: float) -> None:
        self.recorder.on_first_token(job, cached_tokens, now_s)

    def on_end(self, job: Job, status: Status, output_tokens: int, now_s: float) -> None:
        self.recorder.on_end(job.row, status, output_tokens, now_s)
        if status is Status.OK:
            following = self._workload.on_finish(job.request, now_s)
            if following is not None:
                self._expect(following)
