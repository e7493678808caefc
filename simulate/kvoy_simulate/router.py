"""One router replica in virtual time: the real pool and policy, and what the proxy does with them.

A request goes to the engine that the pool picks; after a failure to another one, as long as the
router's limits allow. Between the router and everything else lie the delays of `Ways`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from kvoy_contract.errors import ApiError
from kvoy_engine.messages import ErrorKind, FinishReason, TokensOut
from kvoy_router.pool import Pool
from kvoy_router.request import InferenceRequest
from kvoy_simulate.clock import VirtualClock
from kvoy_simulate.engine import MODEL, Said, VirtualEngine
from kvoy_simulate.job import Attempt, Job
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
        self._max_retries = surroundings.scenario.max_retries
        self.position = position
        self.pool = pool
        self.links: dict[str, TelemetryLink] = {}
        self._stride = stride
        self._random = random
        self._on_link = on_link
        self._jobs: dict[int, Job] = {}
        self._is_alive = True
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
        if not self._is_alive:
            self._end(job, Status.CUT)
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
        self._send(job, Status.REFUSED)

    def _send(self, job: Job, otherwise: Status) -> None:
        """To the best engine that was not tried; `otherwise` the job ends like that."""
        now_s = self._clock.now_s
        assert job.inference is not None
        try:
            decision = self.pool.pick(job.inference, now_s, job.tried)
        except ApiError:
            self._end(job, otherwise)
            return
        self.num_picks += 1
        address = decision.endpoint.id
        job.tried |= {address}
        job.num_attempts += 1
        attempt = job.attempt = Attempt(job, decision.lease)
        self._around.on_sent(job, address, decision.cached_tokens, now_s)
        self._clock.after(self._ways.request_s, self._arrive, attempt, address)

    def _arrive(self, attempt: Attempt, address: str) -> None:
        if not attempt.is_open:
            return
        engine = self._around.engine_at(address)
        if engine is None:
            self._clock.after(self._ways.request_s, self.on_broken, attempt)
        else:
            engine.accept(attempt)

    def on_said(self, items: Said) -> None:
        """First and last outputs of streams have arrived."""
        for attempt, out in items:
            if not attempt.is_open:
                continue
            if out.finish_reason is FinishReason.ERROR and not attempt.num_tokens:
                self._on_refused(attempt, out)
                continue
            self._note_first_token(attempt, out)
            if out.finish_reason is FinishReason.ERROR:
                self.on_broken(attempt)
            elif out.finish_reason is not None:
                self._close(attempt)
                self._end(attempt.job, Status.OK, attempt.num_tokens)

    def on_turned_away(self, attempt: Attempt) -> None:
        """The engine drains."""
        if attempt.is_open:
            self._close(attempt)
            self._retry(attempt)

    def on_broken(self, attempt: Attempt) -> None:
        """The connection to the engine was refused or broke."""
        if not attempt.is_open:
            return
        self._close(attempt)
        job = attempt.job
        if job.output_tokens + attempt.num_tokens:
            self._end(job, Status.BROKEN, attempt.num_tokens)
        else:
            self._retry(attempt)

    def kill(self) -> None:
        """The process is gone: every stream is cut, and engines see closed connections."""
        self._is_alive = False
        self.cut(Status.CUT)
        for address in list(self.links):
            self.remove_engine(address)

    def cut(self, status: Status) -> None:
        """End every job that is still open."""
        for job in list(self._jobs.values()):
            self._give_up(job, status)

    def check_integrity(self) -> None:
        """Of the pool, and that every lease belongs to an open attempt."""
        self.pool.check_integrity()
        leases = sum(endpoint.ledger.in_flight for endpoint in self.pool.endpoints)
        attempts = [job.attempt for job in self._jobs.values()]
        held = [a for a in attempts if a is not None and a.is_open and a.lease.is_open]
        away = [a for a in held if self.pool.endpoint(a.lease.endpoint.id) is not a.lease.endpoint]
        assert leases == len(held) - len(away), f"{leases} leases for {len(held)} attempts"

    def _give_up(self, job: Job, status: Status) -> None:
        attempt, num_tokens = job.attempt, 0
        if attempt is not None and attempt.is_open:
            num_tokens = attempt.num_tokens
            self._close(attempt)
            if attempt.engine is not None:
                self._clock.after(self._ways.request_s, attempt.engine.hang_up, attempt)
        self._end(job, status, num_tokens)

    def _on_refused(self, attempt: Attempt, out: TokensOut) -> None:
        self._close(attempt)
        if out.error_kind is ErrorKind.TOO_LONG:
            self._end(attempt.job, Status.REFUSED)  # every engine would say the same
        else:
            self._retry(attempt)

    def _retry(self, attempt: Attempt) -> None:
        job = attempt.job
        if job.num_attempts > self._max_retries:
            self._end(job, Status.REFUSED)
        else:
            self._send(job, Status.REFUSED)

    def _note_first_token(self, attempt: Attempt, out: TokensOut) -> None:
        if attempt.lease.first_token_s is None:
            now_s = self._clock.now_s
            attempt.lease.on_first_token(now_s)
            if not attempt.job.output_tokens:
                at_client_s = now_s + self._ways.client_s
                self._around.on_first_token(attempt.job, out.num_cached_tokens, at_client_s)

    def _close(self, attempt: Attempt) -> None:
        attempt.is_open = False
        attempt.lease.release(self._clock.now_s)

    def _end(self, job: Job, status: Status, num_tokens: int = 0) -> None:
        assert job.is_open
        job.is_open = False
        del self._jobs[job.row]
        output_tokens = job.output_tokens + num_tokens
        at_client_s = self._clock.now_s + self._ways.client_s
        self._around.on_end(job, status, output_tokens, at_client_s)
