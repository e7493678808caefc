"""Tells users: the status when it has changed, an Event and a log line when a condition turns."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.cluster import Cluster
from kvoy_operator.events import EventPost
from kvoy_operator.observed import Body
from kvoy_operator.transitions import transitions

log = logging.getLogger(__name__)


class Reporter:
    def __init__(self, cluster: Cluster, events: EventPost) -> None:
        self._cluster = cluster
        self._events = events

    async def report(self, body: Body, status: Mapping[str, Any]) -> None:
        """Write the status of `body` and announce what has turned. Raises ApiFailure."""
        if not await self.write(body, status):
            return
        metadata = body["metadata"]
        before = (body.get("status") or {}).get("conditions") or ()
        resource = f"{body['kind']}/{metadata['namespace']}/{metadata['name']}"
        for turned in transitions(before, status["conditions"]):
            log.info(
                "transition",
                extra={"resource": resource, "reason": turned.reason, "why": turned.message},
            )
            self._events.tell(body, turned)

    async def write(self, body: Body, status: Mapping[str, Any]) -> bool:
        """Write the status if it differs from what is there; whether it was written."""
        if status == body.get("status"):
            return False
        try:
            await self._cluster.patch_status(body, status)
        except ApiRefusal as error:
            if error.is_not_found:
                return False  # deleted since it was read
            raise
        return True
