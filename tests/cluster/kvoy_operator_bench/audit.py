"""Counts calls in the API server's own audit log: who changed what, whether or not it took effect.

Leases are left out: renewing them is how leaders and nodes say that they live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvoy_cluster.pki import ADMINS

WRITES = ("create", "update", "patch", "delete", "deletecollection")
POLICY: Mapping[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
        # Questions about rights are calls that create nothing.
        {"level": "None", "resources": [{"group": "authorization.k8s.io"}]},
        {"level": "Metadata", "verbs": list(WRITES)},
        # Administrators: the benchmark itself, the controllers, and the API server.
        {"level": "None", "userGroups": [ADMINS]},
        {"level": "Metadata"},
    ],
}


class _User(msgspec.Struct):
    username: str = ""


class _Object(msgspec.Struct):
    resource: str = ""
    subresource: str = ""


class _Status(msgspec.Struct):
    code: int = 0


class _Event(msgspec.Struct):
    verb: str
    user: _User
    objectRef: _Object | None = None
    responseStatus: _Status | None = None


@dataclass(frozen=True, slots=True)
class Call:
    user: str
    verb: str
    resource: str
    """`deployments`, or `llmservices/status`."""
    code: int


class AuditLog:
    """Reads what has been added since it was last asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    @property
    def num_bytes(self) -> int:
        """Grows with every call."""
        return self._path.stat().st_size

    def read(self) -> Counter[Call]:
        """Calls since the last `read`."""
        return Counter(self._new_calls())

    def _new_calls(self) -> Iterator[Call]:
        decoder = msgspec.json.Decoder(_Event)
        with self._path.open("rb") as log:
            log.seek(self._offset)
            for line in log:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._offset += len(line)
                yield _call(decoder.decode(line))


def num_writes(calls: Mapping[Call, int], user: str | None = None) -> int:
    """How many of the calls change something; `user`: only this one's."""
    return sum(
        count for call, count in calls.items() if call.verb in WRITES and user in (None, call.user)
    )


def _call(event: _Event) -> Call:
    target = event.objectRef or _Object()
    resource = "/".join(part for part in (target.resource, target.subresource) if part)
    code = event.responseStatus.code if event.responseStatus else 0
    return Call(event.user.username, event.verb, resource, code)
