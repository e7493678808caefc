"""A request's way from engine to engine: who has failed it, and whether it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from kvoy_contract.errors import ApiError, UpstreamFailed
from kvoy_router.attempt import Attempt, Refusal
from kvoy_router.endpoint import Endpoint
from kvoy_router.errors import UpstreamError
from kvoy_router.failover import Failover, GaveUp
from kvoy_router.flow_gate import Admission
from kvoy_router.stream_progress import StreamProgress


@dataclass(slots=True, eq=False)
class Course:
    failover: Failover
    progress: StreamProgress | None
    """Of a stream that may be continued elsewhere."""
    tried: dict[Endpoint, bytes]
    """By endpoint the epoch that was asked: after a restart it is another engine."""
    admission: Admission | None = None
    is_suspect: bool = False
    """Whether engines had died of an equal request before this one began."""

    def begin_as_suspect(self, num_kills: int) -> None:
        """So many engines count as killed by it already."""
        self.is_suspect = num_kills > 0
        self.failover.num_kills = num_kills

    def excluded(self) -> frozenset[str]:
        """Ids of the engines that are not asked again."""
        return frozenset(e.id for e, epoch in self.tried.items() if epoch == _epoch_of(e))

    def note_tried(self, endpoint: Endpoint) -> None:
        self.tried[endpoint] = _epoch_of(endpoint)

    def judge(
        self, attempt: Attempt, failure: Refusal | UpstreamError, now_s: float
    ) -> GaveUp | None:
        """Whether, and how, the request goes on after a failed attempt. None: it does."""
        error = failure if isinstance(failure, UpstreamError) else None
        stop = None
        if attempt.response.status:
            stop = GaveUp.NO_TOKEN_IDS
            if self.progress is not None:
                stop = self.progress.prepare_resume(attempt.job.inference.num_choices)
        elif self.progress is not None:
            self.progress.restart()
        if stop is None:
            stop = self.failover.after(error, attempt.first_byte_s, now_s)
        return stop


def error_of(failure: UpstreamError, stop: GaveUp, *, has_begun: bool) -> ApiError:
    """What a client is told of a request that no other engine goes on with."""
    error = failure.to_api_error()
    message = error.message.removesuffix(".")
    if has_begun:
        error.message = f"{message}. The stream could not be continued: {stop.explanation}."
    elif stop is GaveUp.SUSPECT:
        return UpstreamFailed(
            f"{message}. It is not tried again: {stop.explanation}.", code="suspect"
        )
    return error


def _epoch_of(endpoint: Endpoint) -> bytes:
    return endpoint.info.epoch if endpoint.info is not None else b""
