"""The one secret from which all others are derived: made once, in the operator's namespace."""

from __future__ import annotations

import base64
import logging
import os

from kvoy_operator.api import Api
from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.kinds import SECRET

log = logging.getLogger(__name__)

_KEY = "master"
_NUM_BYTES = 32


async def load_master_secret(api: Api, namespace: str, name: str) -> bytes:
    """Read the Secret, or make it. Raises ApiFailure, and ValueError for one without our key."""
    path = SECRET.path(namespace, name)
    try:
        secret = await api.request("GET", path)
    except ApiRefusal as error:
        if not error.is_not_found:
            raise
        secret = await _make(api, namespace, name)
    encoded = (secret.get("data") or {}).get(_KEY, "")
    value = base64.b64decode(encoded)
    if len(value) < _NUM_BYTES:
        raise ValueError(f"Secret {namespace}/{name}: key {_KEY} has fewer than {_NUM_BYTES} bytes")
    return value


async def _make(api: Api, namespace: str, name: str) -> dict[str, object]:
    value = base64.b64encode(os.urandom(_NUM_BYTES)).decode()
    manifest = {"metadata": {"name": name}, "type": "Opaque", "data": {_KEY: value}}
    try:
        made: dict[str, object] = await api.request("POST", SECRET.path(namespace), body=manifest)
    except ApiRefusal as error:
        if not error.is_conflict:
            raise
        # Another operator was faster; what it made counts.
        made = await api.request("GET", SECRET.path(namespace, name))
    log.info("master secret made", extra={"secret": f"{namespace}/{name}"})
    return made
