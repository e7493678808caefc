"""Whether a request whose engine has failed goes to another one: the bounds, without any I/O.

    nothing of the failed attempt's answer has come → a retry, from the beginning or the last seam
    some of it has come                             → a resume behind what the client has

Both are bounded per request, and by a budget for all requests together. An engine that dies or
hangs while it begins a request makes that request suspect of having killed it: a second time, and
it is ended, so that it cannot kill one engine after another."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvoy_router.errors import ConnectionBroken, EngineHung, IdleTimeout, UpstreamError
from kvoy_router.retry_budget import RetryBudget

_DEATHS = (ConnectionBroken, EngineHung, IdleTimeout)


class GaveUp(enum.StrEnum):
    """Why a request is not sent to another engine."""

    TOO_MANY = "too_many"
    BUDGET = "budget"
    SUSPECT = "suspect"
    NO_TOKEN_IDS = "no_token_ids"
    TOO_LONG = "too_long"
    NO_MEMORY = "no_memory"
    MALFORMED = "malformed_ids"
    NO_ENGINE = "no_engine"

    @property
    def explanation(self) -> str:
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    GaveUp.TOO_MANY: "as many engines as allowed have failed it",
    GaveUp.BUDGET: "too many other requests are being tried again",
    GaveUp.SUSPECT: "two engines have failed while they began this request",
    GaveUp.NO_TOKEN_IDS: "its engine says no token ids, or resuming is off",
    GaveUp.TOO_LONG: "it is longer than the router remembers",
    GaveUp.NO_MEMORY: "the router's memory for resuming streams was full",
    GaveUp.MALFORMED: "its engine's token ids were malformed",
    GaveUp.NO_ENGINE: "no other engine can go on with it",
}


@dataclass(frozen=True, slots=True)
class FailoverLimits:
    max_retries: int = 2
    """Attempts beyond the first that follow one without any byte of an answer."""
    max_resumes: int = 2
    max_kills: int = 2
    """Engines that may fail while they begin the request."""
    begin_s: float = 1.0
    """For so long after its first byte an attempt counts as just begun."""


class Failover:
    """One request's failed attempts."""

    __slots__ = (
        "_limits",
        "_resume_budget",
        "_retry_budget",
        "num_kills",
        "num_resumes",
        "num_retries",
    )

    def __init__(
        self, limits: FailoverLimits, retry_budget: RetryBudget, resume_budget: RetryBudget
    ) -> None:
        self._limits = limits
        self._retry_budget = retry_budget
        self._resume_budget = resume_budget
        self.num_retries = 0
        self.num_resumes = 0
        self.num_kills = 0

    def after(
        self, failure: UpstreamError | None, first_byte_s: float | None, now_s: float
    ) -> GaveUp | None:
        """Judge a failed attempt. None: another engine may be tried, which is counted.

        `failure` is None for an engine that has answered that it cannot serve now; `first_byte_s`
        is when the attempt's answer began, None if it did not.
        """
        has_just_begun = first_byte_s is None or now_s - first_byte_s < self._limits.begin_s
        if has_just_begun and self.count_death(failure):
            return GaveUp.SUSPECT
        if first_byte_s is None:
            if self.num_retries >= self._limits.max_retries:
                return GaveUp.TOO_MANY
            if not self._retry_budget.take(now_s):
                return GaveUp.BUDGET
            self.num_retries += 1
            return None
        if self.num_resumes >= self._limits.max_resumes:
            return GaveUp.TOO_MANY
        if not self._resume_budget.take(now_s):
            return GaveUp.BUDGET
        self.num_resumes += 1
        return None

    def count_death(self, failure: object) -> bool:
        """What an attempt failed of that had just begun. Whether that makes its request suspect."""
        if not isinstance(failure, _DEATHS):
            return False
        self.num_kills += 1
        return self.num_kills >= self._limits.max_kills
