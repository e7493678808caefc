"""HTTP/1.1 messages of the router's own server: requests as parsed, heads as bytes.

Header names are lower-case bytes everywhere. Knows no socket and no route.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

from kvoy_contract.errors import ApiError, BadRequest
from kvoy_router.body_memory import Claim

Headers = list[tuple[bytes, bytes]]

JSON_TYPE = (b"content-type", b"application/json")

_UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


class HeadersTooLarge(ApiError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class ExpectationFailed(ApiError):
    status = 417
    type = "invalid_request_error"


@dataclass(slots=True, eq=False)
class Request:
    """One complete request; `body` is the whole of it, unframed."""

    method: str
    target: bytes
    headers: Headers
    is_http_1_0: bool = False
    keep_alive: bool = True
    body: bytes = b""
    claim: Claim | None = None
    """The place of a large body; ends with the request."""
    extra_bytes: int = 0
    """Of a small one: what is counted besides its body."""
    path: str = field(init=False)
    query: bytes = field(init=False)

    def __post_init__(self) -> None:
        path, _, self.query = self.target.partition(b"?")
        if not path.startswith(b"/"):
            # The absolute form that clients of forward proxies send: http://host/path
            _, _, rest = path.partition(b"://")
            slash = rest.find(b"/")
            path = rest[slash:] if slash >= 0 else b"/"
        self.path = path.decode("latin-1")

    @property
    def waits(self) -> bool:
        """Whether it has no place in memory yet."""
        return self.claim is not None and not self.claim.is_held

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def media_type(self) -> str:
        """The content type without parameters, lower-case; empty when there is none."""
        value = self.header(b"content-type") or b""
        return value.partition(b";")[0].strip().lower().decode("latin-1")


def check_head(target: bytes, headers: Headers, version: str, max_bytes: int) -> int | None:
    """The body's announced length; None for a chunked one.

    Raises HeadersTooLarge, ExpectationFailed, and BadRequest for a length that is ambiguous.
    """
    if len(target) + sum(len(name) + len(value) + 4 for name, value in headers) > max_bytes:
        raise HeadersTooLarge("The request's headers are too large.")
    length = _framed_length(headers, version)
    expectations = [value for name, value in headers if name == b"expect"]
    if expectations and expectations[0].strip().lower() != b"100-continue":
        raise ExpectationFailed("The only supported Expect is 100-continue.")
    return length


def _framed_length(headers: Headers, version: str) -> int | None:
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        if len(lengths) > 1:
            raise BadRequest("More than one Content-Length.")
        return int(lengths[0]) if lengths else 0
    if lengths:
        raise BadRequest("Both Content-Length and Transfer-Encoding.")
    if len(codings) > 1 or codings[0].strip().lower() != b"chunked":
        raise BadRequest("The only supported Transfer-Encoding is chunked.")
    if version != "1.1":
        raise BadRequest("Transfer-Encoding needs HTTP/1.1.")
    return None


def refusal_of(parser_error: Exception) -> ApiError:
    """Of a request that the parser has given up: what its callback raised, or that it is no
    HTTP."""
    raised = parser_error.__context__
    if isinstance(raised, ApiError):
        return raised
    return BadRequest(f"Malformed HTTP request: {parser_error}")


def without_upgrade(headers: Headers) -> Headers:
    """Those of a request that no longer offers another protocol."""
    return [header for header in headers if header[0] not in _UPGRADE_HEADERS]


def encode_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Status line and header block with the empty line after it."""
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    return line + b"".join([b"%b: %b\r\n" % header for header in headers]) + b"\r\n"


def encode_request_head(
    method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    line = b"%b %b HTTP/1.1\r\n" % (method, target)
    return line + b"".join([b"%b: %b\r\n" % header for header in headers]) + b"\r\n"


def error_headers(error: ApiError) -> Headers:
    """Headers of an OpenAI error object's response."""
    extra = [(name.encode(), value.encode()) for name, value in error.headers()]
    return [JSON_TYPE, *extra]
