"""Errors that reach an API client, as OpenAI error objects.

ApiError                     status, message, type, param, code, retry_after_s
  BadRequest            400  the request is wrong; sending it again does not help
    ContextLengthExceeded    code context_length_exceeded
  Unauthorized          401
  Forbidden             403
  NotFound              404  path or method of the API
    ModelNotFound            code model_not_found, param model
  PayloadTooLarge       413
  Saturated             429  full; retry after `retry_after_s`
  EngineFailed          500  the engine broke while it computed this request; retry helps
  UpstreamFailed        502  an engine could not be reached or broke its answer
  Unavailable           503  nothing can serve now; retry after `retry_after_s`
  DeadlineExceeded      504

Both the engine and the router raise these, and only the HTTP surfaces turn them into bytes.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec


class ApiError(Exception):
    """An error with everything that an OpenAI error object needs.

    `param` names the field of the request that is wrong, in the notation `messages[0].content`.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, Any]:
        """The body `{"error": {...}}` that clients of the OpenAI API parse."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def to_json(self) -> bytes:
        return msgspec.json.encode(self.to_dict())

    def headers(self) -> list[tuple[str, str]]:
        """Extra response headers: `retry-after` where it is set, in whole seconds, at least 1;
        rounded up, since whoever comes back sooner is turned away again."""
        if self.retry_after_s is None:
            return []
        return [("retry-after", str(max(1, math.ceil(self.retry_after_s))))]


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class Unauthorized(ApiError):
    status = 401
    type = "authentication_error"


class Forbidden(ApiError):
    status = 403
    type = "permission_error"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model[:200]}` does not exist.", param="model")


class MethodNotAllowed(ApiError):
    """`allow` lists what the path takes, as in `GET, HEAD`."""

    status = 405
    type = "invalid_request_error"

    def __init__(self, message: str, *, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow

    def headers(self) -> list[tuple[str, str]]:
        own = [("allow", self.allow)] if self.allow else []
        return [*super().headers(), *own]


class PayloadTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class RequestTimeout(ApiError):
    """The client was too slow to send its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Saturated(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "saturated"


class EngineFailed(ApiError):
    status = 500
    code = "engine_error"


class UpstreamFailed(ApiError):
    status = 502
    code = "upstream_error"


class Unavailable(ApiError):
    status = 503
    code = "unavailable"


class DeadlineExceeded(ApiError):
    status = 504
    code = "deadline_exceeded"
