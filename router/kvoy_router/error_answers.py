"""What a client hears where no engine's answer reaches it, or not all of one."""

from __future__ import annotations

from kvoy_contract.errors import ApiError, UpstreamFailed
from kvoy_contract.sse import error_event
from kvoy_router.attempt import Attempts, Refusal
from kvoy_router.course import error_of
from kvoy_router.errors import UpstreamError
from kvoy_router.failover import GaveUp
from kvoy_router.failover_metrics import FailoverMetrics
from kvoy_router.http_message import error_headers
from kvoy_router.http_response import Response
from kvoy_router.record import RequestRecord

_OF_ITS_STATE = (429, 503, 504)
"""What an engine says of itself and a client can act on."""


class ErrorAnswers:
    def __init__(self, attempts: Attempts, metrics: FailoverMetrics) -> None:
        self._attempts = attempts
        self._metrics = metrics

    def tell(self, error: ApiError, response: Response, record: RequestRecord) -> None:
        """As the answer, or as the last event of a stream that has begun."""
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

    def pass_on(self, refusal: Refusal, response: Response, record: RequestRecord) -> None:
        """Send an engine's error answer; as our own 502 where it is no OpenAI error object."""
        record.outcome = "refused" if refusal.status < 500 else "engine_error"
        status, message = refusal.status, refusal.message
        is_meant_for_client = status in _OF_ITS_STATE or refusal.concerns_request
        if is_meant_for_client and message is not None:
            response.send(status, refusal.headers, refusal.body)
            return
        error = UpstreamFailed(message or f"The engine answered with status {status}.")
        self.tell(error, response, record)

    def give_up(
        self,
        failure: Refusal | UpstreamError,
        stop: GaveUp,
        response: Response,
        record: RequestRecord,
    ) -> None:
        """No further engine is tried. Passes on what the last one said; raises ApiError where it
        said nothing."""
        if isinstance(failure, Refusal):
            self.pass_on(failure, response, record)
            return
        if response.status:
            record.outcome = failure.outcome
            self._metrics.on_resume(record.model, stop.value)
        raise error_of(failure, stop, has_begun=bool(response.status)) from None
