"""The generating endpoints: a job goes to an engine, to another one while that helps, and its
answer back.

As long as the client has not seen a byte, a failed attempt is followed by another from the
beginning. A stream that has begun is continued by an engine that goes on behind what the client
has, see `stream_progress`; where there is none, an error event ends it. What an engine says of the
request itself (4xx) is passed on; what it says of its own state (429, 5xx) is passed on when no
other engine is left. A client that goes away cancels this task, which closes the connection to
the engine and gives back the lease."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from kvoy_contract.errors import ApiError, DeadlineExceeded
from kvoy_contract.tracing import Span, Tracing
from kvoy_router import request_spans
from kvoy_router.access import Client
from kvoy_router.attempt import Attempt, Attempts, Refusal
from kvoy_router.breaker import Breakers
from kvoy_router.client_headers import check_headers, request_id_of
from kvoy_router.course import Course
from kvoy_router.decision import Decision
from kvoy_router.dispatch import Dispatcher, Job
from kvoy_router.entrance import Entrance
from kvoy_router.error_answers import ErrorAnswers
from kvoy_router.errors import ResumeRefused, UpstreamError
from kvoy_router.failover import Failover, FailoverLimits, GaveUp
from kvoy_router.hedging import HedgeOptions, Hedging
from kvoy_router.http_client import ClientPool, Exchange
from kvoy_router.http_message import Request
from kvoy_router.http_response import Response
from kvoy_router.metrics import Metrics
from kvoy_router.race import Opening, race
from kvoy_router.record import RequestRecord
from kvoy_router.resume_memory import ResumeMemory
from kvoy_router.retry_budget import RetryBudget
from kvoy_router.stream_progress import StreamProgress
from kvoy_router.suspects import Suspects
from kvoy_router.time_limit import TimeLimit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    router_id: str
    response_headers: bool = True
    request_timeout_s: float = 600.0
    failover: FailoverLimits = field(default_factory=FailoverLimits)
    max_progress_bytes: int = 512 * 1024
    """Of a stream's token ids, as text."""
    hedge: HedgeOptions = field(default_factory=HedgeOptions)


class Proxy:
    def __init__(
        self,
        entrance: Entrance,
        dispatcher: Dispatcher,
        clients: ClientPool,
        breakers: Breakers,
        metrics: Metrics,
        options: ProxyOptions,
        budgets: tuple[RetryBudget, RetryBudget],
        memory: ResumeMemory,
        now_s: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        """`budgets`: for retries, and for resumes."""
        self._tracing = tracing
        self._entrance = entrance
        self._dispatcher = dispatcher
        self._breakers = breakers
        self._metrics = metrics
        self.options = options
        self._retry_budget, self._resume_budget = budgets
        self._memory = memory
        self.suspects = Suspects()
        self._hedging = Hedging(options.hedge)
        self._now_s = now_s
        self._attempts = Attempts(
            clients, options.router_id, options.response_headers, now_s, self._on_first_byte
        )
        self._errors = ErrorAnswers(self._attempts, metrics.failover)

    def use_options(self, options: ProxyOptions) -> None:
        """For requests that come from now on; of one under way only what is still ahead."""
        self.options = options
        self._attempts.shows_headers = options.response_headers
        self._hedging.options = options.hedge

    async def serve(self, request: Request, response: Response) -> None:
        """Answer a request to a generating endpoint; every way ends in one log line."""
        record = RequestRecord(request_id_of(request), request.path, self._now_s())
        if self._tracing is not None:
            record.span = request_spans.begin(self._tracing, request, record)
        self._metrics.in_flight += 1
        limit_s = self.options.request_timeout_s
        try:
            with TimeLimit(limit_s):
                check_headers(request)
                await self._dispatch(request, response, record)
        except ApiError as error:
            self._errors.tell(error, response, record)
        except TimeoutError:
            overdue = DeadlineExceeded(f"The request took longer than {limit_s:g} s.")
            self._errors.tell(overdue, response, record)
        except asyncio.CancelledError:
            record.outcome = "client_gone"
            raise
        except Exception:
            record.outcome = "internal_error"
            raise
        finally:
            self._metrics.in_flight -= 1
            record.status = response.status
            now_s = self._now_s()
            self._metrics.on_request(record, now_s)
            self._entrance.end(record)
            request_spans.end(record, now_s)
            if log.isEnabledFor(logging.INFO):
                log.info("request", extra=record.log_fields(now_s))

    async def _dispatch(self, request: Request, response: Response, record: RequestRecord) -> None:
        client = self._entrance.begin(request, record)
        job = await self._prepare(request, record, client)
        course = self._begin_course(job)
        course.begin_as_suspect(self.suspects.check(job.body, self._now_s()))
        came_s = self._now_s()
        request_spans.received(record, came_s)
        async with self._entrance.admit(job, record) as admission:
            if admission.has_waited:
                self._entrance.note_wait(record, came_s)
                request_spans.waited(record, came_s, self._now_s())
                if not job.prompt.digest:
                    # By now an engine may be there that says how it encodes.
                    job = await self._prepare(request, record, client)
            course.admission = admission
            try:
                await self._run(job, course, request, response, record)
            finally:
                if (progress := course.progress) is not None:
                    if progress.said:
                        record.output_tokens = progress.num_told_tokens
                    progress.close()
                self._entrance.settle(admission, record)

    async def _prepare(self, request: Request, record: RequestRecord, client: Client) -> Job:
        body = request.body
        job = await self._dispatcher.prepare(request.path, body, record.request_id, client)
        job = self._dispatcher.settled(job, request)
        record.model = job.model
        record.is_stream = job.is_stream
        record.prompt_tokens = job.prompt.num_tokens
        return job

    async def _run(
        self,
        job: Job,
        course: Course,
        request: Request,
        response: Response,
        record: RequestRecord,
    ) -> None:
        """From engine to engine until the client has its answer, or its error."""
        assert course.admission is not None
        engine_priority = course.admission.ticket.engine_priority
        failure: Refusal | UpstreamError | None = None
        while True:
            try:
                decision = self._pick(job, course)
            except ApiError:
                if not course.tried:
                    raise
                assert failure is not None
                self._errors.give_up(failure, GaveUp.NO_ENGINE, response, record)
                return
            if not course.tried:
                self._entrance.start(course.admission, job, decision)
            self._note(decision, course, record)
            attempt = Attempt(
                job, request, response, record, decision, course.progress, engine_priority
            )
            if record.span is not None:
                attempt.span = self._span_of(attempt, course)
            delay_s = self._hedge_delay_s(attempt, course)
            if delay_s is None:
                failure = await self._make(attempt, self._attempts.open(attempt))
            else:
                attempt, opening = await self._race(attempt, delay_s, course)
                failure = await self._make(attempt, opening)
            if failure is None:
                return
            stop = course.judge(attempt, failure, self._now_s())
            if stop is not None:
                if stop is GaveUp.SUSPECT:
                    self.suspects.add(job.body, course.is_suspect, self._now_s())
                self._errors.give_up(failure, stop, response, record)
                return

    def _begin_course(self, job: Job) -> Course:
        options = self.options
        self._retry_budget.on_request()
        self._resume_budget.on_request()
        progress = None
        if job.is_stream and options.failover.max_resumes:
            # Two clients may use one request id; their answers are told apart all the same.
            answer_id = f"{job.request_id}.{random.getrandbits(64):016x}"
            progress = StreamProgress(
                answer_id, int(time.time()), options.max_progress_bytes, self._memory
            )
        failover = Failover(options.failover, self._retry_budget, self._resume_budget)
        return Course(failover, progress, {})

    def _pick(self, job: Job, course: Course) -> Decision:
        progress = course.progress
        if progress is None or progress.resume is None or progress.engine is None:
            return self._dispatcher.pick(job, course.excluded())
        return self._dispatcher.pick_to_resume(
            job, course.excluded(), progress.engine, progress.resume
        )

    def _span_of(self, attempt: Attempt, course: Course) -> Span | None:
        now_s, decision = self._now_s(), attempt.decision
        resume = None if course.progress is None else course.progress.resume
        resumed_tokens = None if resume is None else sum(map(len, resume.output_ids))
        request_spans.decided(attempt.record, decision, now_s)
        return request_spans.begin_attempt(attempt.record, decision, resumed_tokens, now_s)

    async def _make(
        self, attempt: Attempt, opening: Awaitable[Exchange | Refusal]
    ) -> Refusal | UpstreamError | None:
        """What became of it; None: the client has its answer."""
        failure: Refusal | UpstreamError
        why: str | None = "cancelled"
        try:
            opened = await opening
            if not isinstance(opened, Refusal):
                await self._attempts.finish(attempt, opened)
                why = None
                return None
            why = opened.outcome
            if opened.concerns_request:
                self._breakers.on_success(attempt.decision.endpoint)
                self._errors.pass_on(opened, attempt.response, attempt.record)
                return None
            failure = opened
        except UpstreamError as error:
            failure, why = error, error.outcome
        finally:
            self._attempts.release(attempt)
            request_spans.end_attempt(attempt.span, attempt.first_byte_s, why, self._now_s())
        self._note_failure(failure.outcome, attempt)
        return failure

    def _hedge_delay_s(self, attempt: Attempt, course: Course) -> float | None:
        """After which a second engine is asked too. Only of a stream, whose first byte is that of
        its first token; only at its beginning; and not while others wait for room."""
        if not self._hedging.is_on or not attempt.job.is_stream:
            return None
        if len(course.tried) > 1 or self._entrance.has_waiting:
            return None
        return self._hedging.delay_s(attempt.decision)

    async def _race(
        self, first: Attempt, delay_s: float, course: Course
    ) -> tuple[Attempt, Opening]:
        """The attempt that goes on, and its opening, which is done."""
        record = first.record
        hedge: Attempt | None = None

        def make_second() -> Attempt | None:
            nonlocal hedge
            decision = self._hedge_decision(first.job, course)
            if decision is not None:
                hedge = replace(first, decision=decision, span=None)
                hedge.span = self._span_of(hedge, course) if record.span is not None else None
            return hedge

        def on_end(attempt: Attempt, failure: Refusal | UpstreamError | None) -> None:
            now_s = self._now_s()
            why = "slower" if failure is None else failure.outcome
            request_spans.end_attempt(attempt.span, None, why, now_s)
            if failure is None:
                self._hedging.note(attempt.decision, now_s)
            else:
                self._note_failure(why, attempt)
                course.failover.count_death(failure)

        winner, opening = await race(self._attempts, first, delay_s, make_second, on_end)
        if hedge is not None:
            self._note_answering(winner.decision, record)
            self._metrics.failover.on_hedge(record.model, "second" if winner is hedge else "first")
        return winner, opening

    def _hedge_decision(self, job: Job, course: Course) -> Decision | None:
        try:
            decision = self._pick(job, course)
        except ApiError:
            return None
        if not self._retry_budget.take(self._now_s()):
            decision.lease.release(self._now_s())
            return None
        course.note_tried(decision.endpoint)
        self._metrics.on_decision(decision)
        return decision

    def _note(self, decision: Decision, course: Course, record: RequestRecord) -> None:
        endpoint = decision.endpoint
        if course.tried:
            record.num_retries = course.failover.num_retries
            record.num_resumes = course.failover.num_resumes
        progress = course.progress
        if progress is not None and progress.resume is not None:
            log.info(
                "stream goes on",
                extra={
                    "request_id": record.request_id,
                    "failed_engine": record.engine,
                    "engine": endpoint.name,
                    "output_tokens": sum(map(len, progress.resume.output_ids)),
                },
            )
            record.engine = endpoint.name
        else:
            self._note_answering(decision, record)
        course.note_tried(endpoint)
        self._metrics.on_decision(decision)

    def _note_answering(self, decision: Decision, record: RequestRecord) -> None:
        """What was predicted and when it began are about the attempt that begins the answer."""
        record.decision = decision
        record.policy = decision.policy
        record.predicted_cached_tokens = decision.cached_tokens
        record.engine = decision.endpoint.name

    def _note_failure(self, why: str, attempt: Attempt) -> None:
        endpoint = attempt.decision.endpoint
        if why not in ("status_429", ResumeRefused.outcome):
            self._breakers.on_failure(endpoint, self._now_s())
        engine = endpoint.name
        self._metrics.on_engine_failure(attempt.record.model, engine, why)
        log.warning(
            "engine failed a request",
            extra={"request_id": attempt.record.request_id, "engine": engine, "reason": why},
        )

    def _on_first_byte(self, attempt: Attempt) -> None:
        record = attempt.record
        if record.first_byte_s is None:
            record.first_byte_s = attempt.first_byte_s
            if record.is_stream and attempt.first_byte_s is not None:
                self._hedging.note(attempt.decision, attempt.first_byte_s)
        self._breakers.on_success(attempt.decision.endpoint)
        if attempt.response.status:
            self._metrics.failover.on_resume(record.model, "resumed")
