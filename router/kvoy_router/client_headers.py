"""What a client may say in its headers, and the name of its request."""

from __future__ import annotations

import random
import re

from kvoy_contract.errors import BadRequest
from kvoy_contract.names import KVOY_HEADER_PREFIX, REQUEST_ID_HEADER
from kvoy_router.http_message import Request

_INTERNAL_PREFIX = KVOY_HEADER_PREFIX.encode()
_REQUEST_ID_NAME = REQUEST_ID_HEADER.encode()
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


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
