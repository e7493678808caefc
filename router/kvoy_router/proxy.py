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
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvoy_contract.errors import ApiError, BadRequest, DeadlineExceeded, UpstreamFailed
from kvoy_contract.names import KVOY_HEADER_PREFIX, REQUEST_ID_HEADER
from kvoy_contract.sse import error_event
from kvoy_contract.tracing import Span, Tracing
from kvoy_router import request_spans
from kvoy_router.access import Client
from kvoy_router.attempt import Attempt, Attempts, Refusal
from kvoy_router.breaker import Breakers
from kvoy_router.decision import Decision
from kvoy_router.dispatch import Dispatcher, Job
from kvoy_router.endpoint import Endpoint
from kvoy_router.entrance import Entrance
from kvoy_router.errors import ResumeRefused, UpstreamError
from kvoy_router.failover import Failover, FailoverLimits, GaveUp
from kvoy_router.flow_gate import Admission
from kvoy_router.http_client import ClientPool
from kvoy_router.http_message import Request, error_headers
from kvoy_router.http_response import Response
from kvoy_router.metrics import Metrics
from kvoy_router.record import RequestRecord
from kvoy_router.resume_memory import ResumeMemory
from kvoy_router.retry_budget import RetryBudget
from kvoy_router.stream_progress import StreamProgress
from kvoy_router.time_limit import TimeLimit

log = logging.getLogger(__name__)

_INTERNAL_PREFIX = KVOY_HEADER_PREFIX.encode()
_REQUEST_ID_NAME = REQUEST_ID_HEADER.encode()
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    router_id: str
    response_headers: bool = True
    request_timeout_s: float = 600.0
    failover: FailoverLimits = field(default_factory=FailoverLimits)
    max_progress_bytes: int = 512 * 1024
    """Of a stream's token ids, as text."""


@dataclass(slots=True, eq=False)
class _Course:
    """A request's way from engine to engine."""

    failover: Failover
    progress: StreamProgress | None
    tried: dict[Endpoint, bytes]
    """By endpoint the epoch that has failed: after a restart it is another engine."""
    admission: Admission | None = None

    def excluded(self) -> frozenset[str]:
        return frozenset(e.id for e, epoch in self.tried.items() if epoch == _epoch_of(e))


def check_headers(request: Request) -> None:
    """Refuse what only a router may say, and bodies that are not plain JSON. Raises BadRequest."""
    for name, _ in request.headers:
        if name.startswith(_INTERNAL_PREFIX):
            raise BadRequest(f"The header {name.decode('latin-1')} is internal.")
    media_type = request.media_type
    if request.body and media_type not in ("application/json", ""):
        raise BadRequest(f"The content type must be application/json, not {media_type}.")
    coding = request.header(b"content-encoding")
    if coding is not None and coding.strip().lower() != b"identity":
        raise BadRequest("Content-Encoding is not supported.")


def request_id_of(request: Request) -> str:
    """The client's own x-request-id where it is printable and short, else a new one."""
    value = request.header(_REQUEST_ID_NAME)
    if value is not None and _REQUEST_ID.fullmatch(value):
        return value.decode("ascii")
    return f"req-{random.getrandbits(96):024x}"


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
        self._options = options
        self._retry_budget, self._resume_budget = budgets
        self._memory = memory
        self._now_s = now_s
        self._attempts = Attempts(
            clients, options.router_id, options.response_headers, now_s, self._on_first_byte
        )

    def use_options(self, options: ProxyOptions) -> None:
        """For requests that come from now on; of one under way only what is still ahead."""
        self._options = options
        self._attempts.shows_headers = options.response_headers

    async def serve(self, request: Request, response: Response) -> None:
        """Answer a request to a generating endpoint; every way ends in one log line."""
        record = RequestRecord(request_id_of(request), request.path, self._now_s())
        if self._tracing is not None:
            record.span = request_spans.begin(self._tracing, request, record)
        self._metrics.in_flight += 1
        limit_s = self._options.request_timeout_s
        try:
            with TimeLimit(limit_s):
                check_headers(request)
                await self._dispatch(request, response, record)
        except ApiError as error:
            self._answer_error(response, record, error)
        except TimeoutError:
            overdue = DeadlineExceeded(f"The request took longer than {limit_s:g} s.")
            self._answer_error(response, record, overdue)
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
        came_s = self._now_s()
        request_spans.received(record, came_s)
        async with self._entrance.admit(job, record) as admission:
            has_waited = self._entrance.note_turn(record, came_s)
            if has_waited:
                request_spans.waited(record, came_s, self._now_s())
            if has_waited and not job.prompt.digest:
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
        record.model = job.model
        record.is_stream = job.is_stream
        record.prompt_tokens = job.prompt.num_tokens
        return job

    async def _run(
        self,
        job: Job,
        course: _Course,
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
                self._give_up(failure, GaveUp.NO_ENGINE, response, record)
                return
            if not course.tried:
                self._entrance.start(course.admission, job, decision)
            self._note(decision, course, record)
            attempt = Attempt(
                job, request, response, record, decision, course.progress, engine_priority
            )
            if record.span is not None:
                attempt.span = self._span_of(attempt, course)
            failure = await self._make(attempt)
            if failure is None:
                return
            stop = self._judge(attempt, failure, course)
            if stop is not None:
                self._give_up(failure, stop, response, record)
                return

    def _begin_course(self, job: Job) -> _Course:
        options = self._options
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
        return _Course(failover, progress, {})

    def _pick(self, job: Job, course: _Course) -> Decision:
        progress = course.progress
        if progress is None or progress.resume is None or progress.engine is None:
            return self._dispatcher.pick(job, course.excluded())
        return self._dispatcher.pick_to_resume(
            job, course.excluded(), progress.engine, progress.resume
        )

    def _span_of(self, attempt: Attempt, course: _Course) -> Span | None:
        now_s, decision = self._now_s(), attempt.decision
        resume = None if course.progress is None else course.progress.resume
        resumed_tokens = None if resume is None else sum(map(len, resume.output_ids))
        request_spans.decided(attempt.record, decision, now_s)
        return request_spans.begin_attempt(attempt.record, decision, resumed_tokens, now_s)

    async def _make(self, attempt: Attempt) -> Refusal | UpstreamError | None:
        """What became of it; None: the client has its answer."""
        endpoint = attempt.decision.endpoint
        failure: Refusal | UpstreamError
        why: str | None = "cancelled"
        try:
            refusal = await self._attempts.make(attempt)
            why = None if refusal is None else f"status_{refusal.status}"
        except UpstreamError as error:
            failure, why = error, error.outcome
        else:
            if refusal is None:
                return None
            if refusal.concerns_request:
                self._breakers.on_success(endpoint)
                self._pass_on(refusal, attempt.response, attempt.record)
                return None
            failure = refusal
        finally:
            request_spans.end_attempt(attempt.span, attempt.first_byte_s, why, self._now_s())
        assert why is not None
        if why not in ("status_429", ResumeRefused.outcome):
            self._breakers.on_failure(endpoint, self._now_s())
        self._note_failure(why, attempt)
        return failure

    def _judge(
        self, attempt: Attempt, failure: Refusal | UpstreamError, course: _Course
    ) -> GaveUp | None:
        """Whether, and how, the request goes on after a failed attempt. None: it does."""
        error = failure if isinstance(failure, UpstreamError) else None
        stop = None
        if attempt.response.status:
            stop = GaveUp.NO_TOKEN_IDS
            if course.progress is not None:
                stop = course.progress.prepare_resume(attempt.job.inference.num_choices)
        elif course.progress is not None:
            course.progress.restart()
        if stop is None:
            stop = course.failover.after(error, attempt.first_byte_s, self._now_s())
        return stop

    def _give_up(
        self,
        failure: Refusal | UpstreamError | None,
        stop: GaveUp,
        response: Response,
        record: RequestRecord,
    ) -> None:
        """Tell the client. Raises ApiError."""
        assert failure is not None
        if isinstance(failure, Refusal):
            self._pass_on(failure, response, record)
            return
        error = failure.to_api_error()
        if response.status:
            record.outcome = failure.outcome
            self._metrics.failover.on_resume(record.model, stop.value)
            note = f"The stream could not be continued: {stop.explanation}."
            error.message = f"{error.message.removesuffix('.')}. {note}"
        elif stop is GaveUp.SUSPECT:
            error = UpstreamFailed(
                f"{error.message.removesuffix('.')}. It is not tried again: {stop.explanation}.",
                code="suspect",
            )
        raise error from None

    def _note(self, decision: Decision, course: _Course, record: RequestRecord) -> None:
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
        else:  # what was predicted and when it began are about the attempt that began the answer
            record.decision = decision
            record.policy = decision.policy
            record.predicted_cached_tokens = decision.cached_tokens
        record.engine = endpoint.name
        course.tried[endpoint] = _epoch_of(endpoint)
        self._metrics.on_decision(decision)

    def _note_failure(self, why: str, attempt: Attempt) -> None:
        engine = attempt.decision.endpoint.name
        self._metrics.on_engine_failure(attempt.record.model, engine, why)
        log.warning(
            "engine failed a request",
            extra={"request_id": attempt.record.request_id, "engine": engine, "reason": why},
        )

    def _on_first_byte(self, attempt: Attempt) -> None:
        record = attempt.record
        if record.first_byte_s is None:
            record.first_byte_s = attempt.first_byte_s
        self._breakers.on_success(attempt.decision.endpoint)
        if attempt.response.status:
            self._metrics.failover.on_resume(record.model, "resumed")

    def _pass_on(self, refusal: Refusal, response: Response, record: RequestRecord) -> None:
        """Send an engine's error answer; as our own 502 where it is no OpenAI error object."""
        record.outcome = "refused" if refusal.status < 500 else "engine_error"
        status, message = refusal.status, refusal.message
        is_meant_for_client = status in (429, 503, 504) or refusal.concerns_request
        if is_meant_for_client and message is not None:
            response.send(status, refusal.headers, refusal.body)
            return
        error = UpstreamFailed(message or f"The engine answered with status {status}.")
        self._answer_error(response, record, error)

    def _answer_error(self, response: Response, record: RequestRecord, error: ApiError) -> None:
        if record.outcome == "ok":
            record.outcome = error.code or error.type
        if not response.status:
            headers = [*error_headers(error), *self._attempts.own_headers(record)]
            response.send(error.status, headers, error.to_json())
        elif not response.finished:
            # The stream has begun: tell it inside, and let closing mark that it is not complete.
            response.keep_alive = False
            response.write(error_event(error))
            response.end()


def _epoch_of(endpoint: Endpoint) -> bytes:
    return endpoint.info.epoch if endpoint.info is not None else b""
