"""Tells users: the status when it has changed, an Event and a log line when a condition turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.cluster import Cluster
from kvoy_operator.observed import Body
from kvoy_operator.transitions import transitions

log = logging.getLogger(__name__)


class Reporter:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def report(self, body: Body, status: Mapping[str, Any]) -> None:
        """Write the status of `body` and announce what has turned. Raises ApiFailure."""
        if not await self.write(body, status):
            return
        metadata = body["metadata"]
        before = (body.get("status") or {}).get("conditions") or ()
        turns = transitions(before, status["conditions"])
        resource = f"{body['kind']}/{metadata['namespace']}/{metadata['name']}"
        for turned in turns:
            log.info(
                "transition",
                extra={"resource": resource, "reason": turned.reason, "why": turned.message},
            )
        # In their order by their own times, whichever arrives first.
        posts = [
            self._cluster.post_event(
                body, type=turned.type, reason=turned.reason, note=turned.message
            )
            for turned in turns
        ]
        await asyncio.gather(*posts)

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
