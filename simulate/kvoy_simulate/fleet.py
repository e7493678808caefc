"""A fleet in virtual time: engines, routers, clients and mishaps, from a scenario to an outcome.

The parts that decide are those that serve: `EngineCore` with its scheduler and block pool, the
telemetry hub and its streams, and on the router's side the stream's reader and the `Pool` with its
policy, index and leases. Here are only the ways between them, the loops that drive them and who
asks for what. One scenario, policy and seed give one outcome.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from kvoy_simulate.baselines import policy_maker
from kvoy_simulate.clock import VirtualClock
from kvoy_simulate.engine import VirtualEngine
from kvoy_simulate.job import Job
from kvoy_simulate.mishaps import Mishaps
from kvoy_simulate.outcome import Outcome, Status
from kvoy_simulate.recorder import Recorder
from kvoy_simulate.replicas import PolicyMaker, Replicas
from kvoy_simulate.scenario import EngineGroup, Scenario
from kvoy_simulate.traffic import SimRequest

START_S = -1.0
"""Engines and routers start before the first request, in time to know each other."""
SETTLE_S = 1.0
"""After the last request's end, for what is still on its way."""
COUNTERS = ("steps", "preemptions", "generated_tokens", "prompt_tokens", "cached_tokens")
"""Of engines, in an outcome."""


def run(scenario: Scenario, *, policy: str | PolicyMaker, seed: int) -> Outcome:
    """Simulate to the last request's end. Raises ValueError for an unknown policy or a scenario
    whose events name unknown engines."""
    gc.collect()  # a fleet that was used up is one large cycle, and what is frozen stays for good
    fleet = Fleet(scenario, policy, seed)
    with kept_from_collection():
        fleet.run()
    return fleet.outcome()


@contextmanager
def kept_from_collection() -> Iterator[None]:
    """What is there now lasts; the garbage collector does not walk through it again and again. The
    block lists of a large fleet have a hundred million entries."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Fleet:
    """One simulation. `run` uses it up."""

    def __init__(self, scenario: Scenario, policy: str | PolicyMaker, seed: int) -> None:
        self.scenario = scenario
        self.clock = VirtualClock(START_S)
        self.recorder = Recorder()
        self.engines: dict[str, VirtualEngine] = {}
        """The live process at each address."""
        self.addresses: list[str] = []
        """Where discovery sees engines."""
        self._seed = seed
        self._num_started = 0
        self._ended: Counter[str] = Counter()
        """Counters of engines that have ended."""
        self._balance = self.random("clients")
        self._workload = scenario.workload(seed)
        self._arrivals: Iterator[SimRequest] = iter(self._workload.start())
        self._num_expected = 0
        """Requests that are known to come."""
        self._mishaps = Mishaps(self)
        make_policy = policy_maker(policy) if isinstance(policy, str) else policy
        self.replicas = Replicas(self, make_policy, self._mishaps.on_link)
        for group in scenario.engines:
            for number in range(group.count):
                self.start_engine(f"{group.name}-{number}", group)
        self.replicas.start(scenario.routers)

    def engine_at(self, address: str) -> VirtualEngine | None:
        """The process that answers there now, if one does."""
        return self.engines.get(address)

    def random(self, concern: str) -> Random:
        """A stream of its own for each concern, so that one does not shift another."""
        return Random(f"{self._seed}/{concern}")

    # Running

    def begin(self) -> None:
        """Ask the clock for everything that does not follow from something else."""
        self._mishaps.schedule(self.scenario.events)
        self.clock.at(0.0, self._sample)
        self._expect_next()

    def run(self) -> None:
        scenario, clock = self.scenario, self.clock
        self.begin()
        clock.run(scenario.duration_s)
        clock.run(scenario.duration_s + scenario.drain_s, self._is_quiet)
        for router in self.replicas.live:
            router.cut(Status.UNFINISHED)
        clock.run(clock.now_s + SETTLE_S)
        for router in self.replicas.live:
            router.check_idle()

    def _is_quiet(self) -> bool:
        return not self.recorder.num_open and not self._num_expected

    def check_integrity(self) -> None:
        """Every invariant of every live part, and that nothing is held by nobody."""
        for engine in self.engines.values():
            engine.core.check_integrity()
        for router in self.replicas.live:
            router.check_integrity()

    def check_settled(self) -> None:
        """Nothing is left of any request, neither at routers nor at engines."""
        self.check_integrity()
        for router in self.replicas.live:
            router.check_idle()
        for engine in self.engines.values():
            assert not engine.num_open, f"{engine.name} has requests that nobody waits for"
            assert not engine.core.has_work, f"{engine.name} computes for nobody"

    def settle(self, within_s: float) -> None:
        """Run on until nothing is left of any request. Raises AssertionError where that takes
        longer."""
        clock = self.clock
        end_s = clock.now_s + within_s
        while True:
            try:
                return self.check_settled()
            except AssertionError:
                if clock.now_s >= end_s:
                    raise
            clock.run(min(end_s, clock.now_s + SETTLE_S))

    def outcome(self) -> Outcome:
        scenario, recorder, replicas = self.scenario, self.recorder, self.replicas
        counters = sum(map(_counters_of, self.engines.values()), Counter(self._ended))
        return Outcome(
            policy=replicas.policy_name,
            seed=self._seed,
            duration_s=scenario.duration_s,
            warmup_s=scenario.warmup_s,
            ended_s=self.clock.now_s,
            requests=recorder.requests,
            engines=tuple(recorder.series),
            names=tuple(recorder.names),
            counters={
                **{name: counters[name] for name in COUNTERS},
                "actions": self.clock.num_done,
                "picks": replicas.num_picks,
                "telemetry_events": replicas.num_events,
            },
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
            for router in self.replicas.live:
                router.add_engine(name)

    def end_engine(self, name: str) -> None:
        """Its process is gone: connections and telemetry break."""
        engine = self.engines.pop(name)
        self._ended += _counters_of(engine)
        self.recorder.on_engine_end(engine, self.clock.now_s)
        ways = self.scenario.ways
        for attempt in engine.end():
            self.clock.after(ways.request_s, attempt.job.router.on_broken, attempt)
        for router in self.replicas.live:
            if (link := router.links.get(name)) is not None:
                self.clock.after(ways.telemetry_s, link.on_broken, engine)

    def restart_engine(self, name: str, group: EngineGroup) -> None:
        if name not in self.engines and name in self.addresses:
            self.start_engine(name, group)

    def drain_engine(self, name: str, grace_s: float) -> None:
        """Discovery sees that it is to go; it goes when it is idle or the grace is over."""
        engine = self.engines[name]
        for router in self.replicas.live:
            router.pool.set_draining(name, True)
        engine.drain()
        self.clock.after(grace_s, self._end_drained, engine)

    def _end_drained(self, engine: VirtualEngine) -> None:
        if self.engines.get(engine.name) is not engine:
            return
        self.end_engine(engine.name)
        self.addresses.remove(engine.name)
        for router in self.replicas.live:
            self.clock.after(self.scenario.ways.telemetry_s, router.remove_engine, engine.name)

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
        router = self.replicas.choose(self._balance)
        if router is not None:
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


def _counters_of(engine: VirtualEngine) -> Counter[str]:
    load = engine.core.load()
    return Counter(
        steps=load.num_steps,
        preemptions=load.num_preemptions,
        generated_tokens=load.generated_tokens,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
    )
