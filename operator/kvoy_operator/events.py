"""Posts Kubernetes Events, beside the reconciles that they tell of: nobody waits for one.

A fifth of all that the operator writes while services are created are Events. They queue here and
go out one at a time; one that cannot be posted is dropped, since the status says it too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kvoy_operator.api import Api
from kvoy_operator.api_errors import ApiFailure
from kvoy_operator.kinds import EVENT
from kvoy_operator.observed import Body
from kvoy_operator.transitions import Transition

log = logging.getLogger(__name__)

_CONTROLLER = "kvoy.dev/operator"
_MAX_WAITING = 5_000
"""As many as a thousand services have when all are made at once; about a kilobyte each."""
_MAX_INSTANCE_CHARS = 128
"""That the API server takes as a reporter's name."""


class EventPost:
    """`tell` from anywhere in the loop; `run` posts until it is cancelled."""

    def __init__(self, api: Api, instance: str) -> None:
        """`instance` names this process in the Events."""
        self._api = api
        self._instance = instance[:_MAX_INSTANCE_CHARS]
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._more = asyncio.Event()
        self._is_full = False

    def tell(self, body: Body, turned: Transition) -> None:
        """Have an Event on the resource `body` posted, as of now."""
        if len(self._waiting) >= _MAX_WAITING:
            if not self._is_full:
                log.warning("events are dropped", extra={"num_waiting": len(self._waiting)})
            self._is_full = True
            return
        self._is_full = False
        self._waiting.append(self._event(body, turned))
        self._more.set()

    async def run(self) -> None:
        while True:
            while self._waiting:
                await self._post(self._waiting.popleft())
            self._more.clear()
            await self._more.wait()

    async def _post(self, event: Mapping[str, Any]) -> None:
        try:
            await self._api.raw("POST", EVENT.path(event["metadata"]["namespace"]), body=event)
        except ApiFailure as error:
            said = {"reason": event["reason"], "error": str(error)}
            log.debug("event not posted", extra=said)

    def _event(self, body: Body, turned: Transition) -> dict[str, Any]:
        metadata = body["metadata"]
        now = datetime.now(UTC)
        told = f"{metadata['uid']}{turned.reason}{turned.message}{now.timestamp()}"
        digest = hashlib.sha256(told.encode()).hexdigest()
        return {
            "metadata": {
                "name": f"{metadata['name']}.{digest[:16]}",
                "namespace": metadata["namespace"],
            },
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "type": turned.type,
            "reason": turned.reason,
            "action": "Reconcile",
            "note": turned.message,
            "reportingController": _CONTROLLER,
            "reportingInstance": self._instance,
            "regarding": {
                "apiVersion": body["apiVersion"],
                "kind": body["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
        }
