"""One router replica in virtual time: the real pool and policy, and what the proxy does with them.

A request goes to the engine that the pool picks, around engines whose breaker is open. When that
engine fails, `Failover` says whether another one tries it again, or goes on behind what the client
has. Between the router and everything else lie the delays of `Ways`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

import msgspec

from kvoy_contract.errors import ApiError
from kvoy_engine.messages import ErrorKind, FinishReason, TokensOut
from kvoy_router.breaker import BreakerLimits, Breakers, pick_around
from kvoy_router.decision import Decision
from kvoy_router.errors import (
    ConnectFailed,
    ConnectionBroken,
    EngineErrored,
    UpstreamError,
)
from kvoy_router.failover import Failover, FailoverLimits
from kvoy_router.hang_watch import TICK_S
from kvoy_router.health_watch import HealthWatch
from kvoy_router.pool import Pool
from kvoy_router.request import InferenceRequest
from kvoy_router.retry_budget import RetryBudget
from kvoy_simulate.clock import VirtualClock
from kvoy_simulate.engine import MODEL, Said, VirtualEngine
from kvoy_simulate.gate import VirtualGate
from kvoy_simulate.job import Attempt, Job, epoch_of
from kvoy_simulate.link import TelemetryLink
from kvoy_simulate.outcome import Status
from kvoy_simulate.scenario import Scenario


class Surroundings(Protocol):
    """Everything around a router: the network, the clock, and who is told what became of jobs."""

    clock: VirtualClock
    scenario: Scenario

    def engine_at(self, address: str) -> VirtualEngine | None: ...

    def on_sent(self, job: Job, engine: str, predicted_tokens: int, now_s: float) -> None: ...

    def on_first_token(self, job: Job, cached_tokens: int, now_s: float) -> None: ...

    def on_end(self, job: Job, status: Status, output_tokens: int, now_s: float) -> None: ...


class VirtualRouter:
    def __init__(
        self,
        surroundings: Surroundings,
        position: int,
        pool: Pool,
        stride: int,
        random: Random,
        on_link: Callable[[VirtualRouter, str, TelemetryLink], None],
    ) -> None:
        """`position` is that of the replica, `stride` that of the model's engines; `on_link` sees
        each new telemetry link before it is used."""
        self._around = surroundings
        self._clock = surroundings.clock
        self._ways = surroundings.scenario.ways
        self.position = position
        self.pool = pool
        pool.declare_model(MODEL)
        self.links: dict[str, TelemetryLink] = {}
        self._stride = stride
        self._random = random
        self._on_link = on_link
        self._jobs: dict[int, Job] = {}
        self._ended_as: Status | None = None
        """How requests end that come now; None while it takes them."""
        scenario = surroundings.scenario
        self._limits = FailoverLimits(scenario.max_retries, scenario.max_resumes)
        self._retry_budget = RetryBudget(scenario.retry_share, scenario.retry_burst)
        self._resume_budget = RetryBudget(scenario.retry_share, scenario.retry_burst)
        self._breakers = Breakers(BreakerLimits())
        self._health = HealthWatch(
            pool, self, self._breakers, self._clock.time, scenario.hang_timeout_s
        )
        self._clock.after(TICK_S, self._look_for_hangs)
        self._gate: VirtualGate | None = None
        if scenario.flow is not None:
            self._gate = VirtualGate(
                self._clock,
                pool,
                self._breakers.blocked,
                MODEL,
                scenario.flow,
                self._send,
                self._refuse,
            )
        self.num_picks = 0
        self._num_earlier_events = 0

    @property
    def router_id(self) -> str:
        return self.pool.router_id

    @property
    def num_events(self) -> int:
        """Telemetry events that it has read."""
        return self._num_earlier_events + sum(link.num_events for link in self.links.values())

    @property
    def num_open(self) -> int:
        return len(self._jobs)

    @property
    def knows_its_engines(self) -> bool:
        """Whether each has reported or failed to: what a new router waits for to be ready."""
        return all(link.is_in_sync or link.has_failed for link in self.links.values())

    # Discovery

    def add_engine(self, address: str) -> None:
        if address in self.links:
            return
        self.pool.add_endpoint(address)
        link = TelemetryLink(
            self._clock,
            self.pool,
            address,
            self._ways.telemetry_s,
            self._around.engine_at,
            self._random,
        )
        self.links[address] = link
        self._on_link(self, address, link)
        link.connect()

    def remove_engine(self, address: str) -> None:
        if (link := self.links.pop(address, None)) is not None:
            self._num_earlier_events += link.num_events
            link.close()
            self.pool.remove_endpoint(address)

    # Jobs

    def begin(self, job: Job) -> None:
        """A request has been read and hashed."""
        request = job.request
        self._jobs[job.row] = job
        if self._ended_as is not None:
            self._end(job, self._ended_as)
            return
        job.inference = InferenceRequest(
            request_id=str(job.row),
            model=MODEL,
            num_prompt_tokens=request.num_prompt_tokens,
            hashes=request.prompt.hashes(self._stride),
            stride=self._stride,
            max_tokens=request.max_tokens,
            priority=request.priority,
            affinity=request.session.encode(),
        )
        self._retry_budget.on_request()
        self._resume_budget.on_request()
        job.failover = Failover(self._limits, self._retry_budget, self._resume_budget)
        if self._gate is None:
            self._send(job)
        else:
            self._gate.enter(job)

    def _send(self, job: Job) -> None:
        """To the best engine that has not failed it."""
        if not job.is_open:
            return
        now_s = self._clock.now_s
        try:
            decision = self._pick(job, now_s)
        except ApiError:
            self._end(job)
            return
        self.num_picks += 1
        endpoint = decision.endpoint
        address = endpoint.id
        job.tried[endpoint] = epoch_of(endpoint)
        job.num_attempts += 1
        if self._gate is not None and job.num_attempts == 1:
            self._gate.start(job, decision.lease)
        attempt = job.attempt = Attempt(job, decision.lease)
        self._around.on_sent(job, address, decision.cached_tokens, now_s)
        self._clock.after(self._ways.request_s, self._arrive, attempt, address)

    def _pick(self, job: Job, now_s: float) -> Decision:
        inference, done = job.inference, job.output_tokens
        assert inference is not None
        if done:
            inference = msgspec.structs.replace(
                inference,
                num_prompt_tokens=inference.num_prompt_tokens + done,
                max_tokens=max(job.request.max_tokens - done, 1),
            )
        return pick_around(self.pool, self._breakers, inference, job.excluded(), now_s)

    def _arrive(self, attempt: Attempt, address: str) -> None:
        if not attempt.is_open:
            return
        engine = self._around.engine_at(address)
        if engine is None:
            failure = ConnectFailed(address)
            self._clock.after(self._ways.request_s, self._on_failure, attempt, failure)
        else:
            engine.accept(attempt)

    def on_said(self, items: Said) -> None:
        """First and last outputs of streams have arrived."""
        for attempt, out in items:
            if not attempt.is_open:
                continue  # given up: another engine has the request now
            if out.finish_reason is FinishReason.ERROR:
                self._on_error(attempt, out)
                continue
            self._note_first_byte(attempt, out)
            if out.finish_reason is not None:
                self._close(attempt)
                self._end(attempt.job)

    def on_turned_away(self, attempt: Attempt) -> None:
        """The engine drains: it answers with status 503."""
        self._on_failure(attempt, None)

    def on_broken(self, attempt: Attempt) -> None:
        """The engine's process has gone, and with it the connection."""
        self._on_failure(attempt, ConnectionBroken("reset"))

    def kill(self) -> None:
        """The process is gone: every stream is cut, and engines see closed connections."""
        self.cut(Status.CUT)
        for address in list(self.links):
            self.remove_engine(address)

    def cut(self, status: Status) -> None:
        """End every job that is open, and all that are still on their way."""
        self._ended_as = status
        for job in list(self._jobs.values()):
            self._give_up(job, status)

    def check_idle(self) -> None:
        """Every job has ended and every lease has come back."""
        assert not self._jobs, f"{self.router_id} has {len(self._jobs)} open requests"
        for endpoint in self.pool.endpoints:
            assert not endpoint.ledger.in_flight, f"leases on {endpoint.id} are left"

    def check_integrity(self) -> None:
        """Of the pool and the queue, and that every lease belongs to an open attempt."""
        self.pool.check_integrity()
        if self._gate is not None:
            self._gate.flow.check_integrity()
        leases = sum(endpoint.ledger.in_flight for endpoint in self.pool.endpoints)
        attempts = [job.attempt for job in self._jobs.values()]
        held = [a for a in attempts if a is not None and a.is_open and a.lease.is_open]
        away = [a for a in held if self.pool.endpoint(a.lease.endpoint.id) is not a.lease.endpoint]
        assert leases == len(held) - len(away), f"{leases} leases for {len(held)} attempts"

    def _give_up(self, job: Job, status: Status) -> None:
        if job.attempt is not None and job.attempt.is_open:
            self._hang_up(job.attempt)
        self._end(job, status)

    def _look_for_hangs(self) -> None:
        if self._ended_as is None:
            self._health.tick()
            self._clock.after(TICK_S, self._look_for_hangs)

    def fail_quiet(self, address: str, quiet_s: float, min_age_s: float, error: Exception) -> int:
        """See `kvoy_router.health_watch.Exchanges`."""
        assert isinstance(error, UpstreamError)
        now_s = self._clock.now_s
        quiet = [
            attempt
            for job in self._jobs.values()
            if (attempt := job.attempt) is not None
            and attempt.is_open
            and attempt.lease.endpoint.address == address
            and now_s - attempt.heard_s >= quiet_s
            and now_s - attempt.lease.started_s >= min_age_s
        ]
        for attempt in quiet:
            self._on_failure(attempt, error)
        return len(quiet)

    def _on_error(self, attempt: Attempt, out: TokensOut) -> None:
        """The engine says an error: as a status, or within the stream."""
        if out.error_kind is ErrorKind.TOO_LONG:
            self._close(attempt)
            self._end(attempt.job)  # every engine would say the same
        elif attempt.num_tokens:
            self._on_failure(attempt, EngineErrored(out.error or ""))
        else:
            is_full = out.error_kind is ErrorKind.SATURATED
            self._on_failure(attempt, None, is_engines_fault=not is_full)

    def _on_failure(
        self, attempt: Attempt, failure: UpstreamError | None, *, is_engines_fault: bool = True
    ) -> None:
        """`failure` is None for an engine that has said that it cannot serve now."""
        if not attempt.is_open:
            return
        job, now_s = attempt.job, self._clock.now_s
        self._hang_up(attempt)
        if is_engines_fault:
            self._breakers.on_failure(attempt.lease.endpoint, now_s)
        assert job.failover is not None
        if job.failover.after(failure, attempt.first_byte_s, now_s) is None:
            self._send(job)
        else:
            self._end(job)

    def _note_first_byte(self, attempt: Attempt, out: TokensOut) -> None:
        if attempt.first_byte_s is None:
            now_s = attempt.first_byte_s = self._clock.now_s
            attempt.lease.on_first_token(now_s)
            self._breakers.on_success(attempt.lease.endpoint)
            if not attempt.job.output_tokens:
                at_client_s = now_s + self._ways.client_s
                self._around.on_first_token(attempt.job, out.num_cached_tokens, at_client_s)

    def _hang_up(self, attempt: Attempt) -> None:
        """Close the connection; the engine sees it a little later."""
        self._close(attempt)
        if attempt.engine is not None:
            self._clock.after(self._ways.request_s, attempt.engine.hang_up, attempt)

    def _close(self, attempt: Attempt) -> None:
        """Nothing more of this attempt counts; the client has what came."""
        attempt.is_open = False
        attempt.lease.release(self._clock.now_s)
        if attempt.first_byte_s is not None:
            attempt.job.output_tokens += attempt.num_tokens

    def _refuse(self, job: Job) -> None:
        self._end(job, Status.REFUSED)

    def _end(self, job: Job, status: Status | None = None) -> None:
        """By default as its output says: whole, broken off, or nothing at all."""
        assert job.is_open
        job.is_open = False
        job.attempt = None  # so that job and attempt go without the garbage collector's help
        del self._jobs[job.row]
        if self._gate is not None:
            self._gate.leave(job)
        if status is None:
            is_whole = job.output_tokens == job.request.max_tokens
            status = Status.OK if is_whole else _BROKEN[job.output_tokens > 0]
        at_client_s = self._clock.now_s + self._ways.client_s
        self._around.on_end(job, status, job.output_tokens, at_client_s)


_BROKEN = {True: Status.BROKEN, False: Status.REFUSED}
