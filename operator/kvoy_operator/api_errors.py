"""What a call to the API server can fail with.

ApiFailure
├── ApiUnreachable    no answer: the network, a time limit
└── ApiRefusal        an answer that says no
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiFailure(Exception):
    """One call that did not succeed."""

    retry_after_s: float | None = None
    """What the server asked for."""


class ApiUnreachable(ApiFailure):
    """No answer."""


class ApiRefusal(ApiFailure):
    """The server's own `Status`: code, machine-readable reason and message."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        causes: tuple[str, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message or reason or f"HTTP {code}")
        self.code = code
        self.reason = reason
        self.message = message
        self.causes = causes
        """Machine-readable reasons of the details."""
        self.retry_after_s = retry_after_s

    @classmethod
    def from_status(
        cls, code: int, status: Mapping[str, Any], retry_after_s: float | None = None
    ) -> ApiRefusal:
        details = status.get("details") or {}
        if retry_after_s is None and details.get("retryAfterSeconds"):
            retry_after_s = float(details["retryAfterSeconds"])
        causes = tuple(cause.get("reason", "") for cause in details.get("causes") or ())
        return cls(code, status.get("reason", ""), status.get("message", ""), causes, retry_after_s)

    @property
    def is_not_found(self) -> bool:
        return self.code == 404

    @property
    def is_conflict(self) -> bool:
        return self.code == 409

    @property
    def is_invalid(self) -> bool:
        """The object cannot be: trying again does not help."""
        return self.code in (400, 422) or self.is_too_large

    @property
    def is_too_large(self) -> bool:
        """For a request, or for etcd, whose limits come as an internal error."""
        said = ("etcdserver: request is too large", "trying to send message larger than max")
        return self.code == 413 or any(words in self.message for words in said)

    @property
    def is_server_fault(self) -> bool:
        """Something behind the API server does not work, such as an admission webhook."""
        return self.code >= 500 and not self.is_too_large

    @property
    def is_forbidden(self) -> bool:
        return self.code == 403

    @property
    def is_missing_right(self) -> bool:
        """RBAC's own words: the caller may not do this at all."""
        return self.is_forbidden and " cannot " in self.message and "User " in self.message

    @property
    def is_quota_exceeded(self) -> bool:
        return self.is_forbidden and "exceeded quota" in self.message

    @property
    def is_namespace_terminating(self) -> bool:
        """The namespace goes away and takes everything in it along."""
        return self.is_forbidden and (
            "NamespaceTerminating" in self.causes
            or "because it is being terminated" in self.message
        )

    @property
    def is_temporary(self) -> bool:
        return self.code in (409, 429) or self.code >= 500
