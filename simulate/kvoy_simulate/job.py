"""A request on its way through the fleet, and its attempts at engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoy_router.endpoint import Endpoint
from kvoy_router.failover import Failover
from kvoy_router.lease import Lease
from kvoy_router.request import InferenceRequest
from kvoy_simulate.traffic import SimRequest

if TYPE_CHECKING:
    from kvoy_simulate.engine import VirtualEngine
    from kvoy_simulate.router import VirtualRouter


class Job:
    """One client request at one router. `row` is its place in the outcome."""

    __slots__ = (
        "attempt",
        "engine_priority",
        "failover",
        "inference",
        "is_open",
        "num_attempts",
        "output_tokens",
        "request",
        "router",
        "row",
        "tried",
    )

    def __init__(self, row: int, request: SimRequest, router: VirtualRouter) -> None:
        self.row = row
        self.request = request
        self.router = router
        self.inference: InferenceRequest | None = None
        """What the router's pool knows of it; made when it arrives there."""
        self.failover: Failover | None = None
        """Its failed attempts; made with `inference`."""
        self.tried: dict[Endpoint, bytes] = {}
        """By endpoint the epoch that has failed it: after a restart it is another engine."""
        self.engine_priority = request.priority
        """Inside an engine, lower first."""
        self.num_attempts = 0
        self.attempt: Attempt | None = None
        """The one whose tokens count."""
        self.output_tokens = 0
        """What earlier attempts gave the client."""
        self.is_open = True

    def excluded(self) -> frozenset[str]:
        """Engines that are not to get it again."""
        return frozenset(e.id for e, epoch in self.tried.items() if epoch == epoch_of(e))


def epoch_of(endpoint: Endpoint) -> bytes:
    return endpoint.info.epoch if endpoint.info is not None else b""


class Attempt:
    """One request at one engine, from the pick to its end there."""

    __slots__ = (
        "engine",
        "first_byte_s",
        "heard_s",
        "is_open",
        "job",
        "lease",
        "num_tokens",
        "request_id",
    )

    def __init__(self, job: Job, lease: Lease) -> None:
        self.job = job
        self.lease = lease
        self.first_byte_s: float | None = None
        """When something of its answer came to the router."""
        self.heard_s = lease.started_s
        """When its engine last said something."""
        self.request_id = f"{job.row}.{job.num_attempts}"
        self.engine: VirtualEngine | None = None
        """The process that has it."""
        self.num_tokens = 0
        """Sent by that process so far."""
        self.is_open = True
        """Whether the router still listens to it."""
