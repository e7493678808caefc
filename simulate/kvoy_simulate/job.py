"""A request on its way through the fleet, and its attempts at engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        self.tried: frozenset[str] = frozenset()
        self.num_attempts = 0
        self.attempt: Attempt | None = None
        """The one whose tokens count."""
        self.output_tokens = 0
        """What earlier attempts gave the client."""
        self.is_open = True


class Attempt:
    """One request at one engine, from the pick to its end there."""

    __slots__ = ("engine", "is_open", "job", "lease", "num_tokens", "request_id")

    def __init__(self, job: Job, lease: Lease) -> None:
        self.job = job
        self.lease = lease
        self.request_id = f"{job.row}.{job.num_attempts}"
        self.engine: VirtualEngine | None = None
        """The process that has it."""
        self.num_tokens = 0
        """Sent by that process so far."""
        self.is_open = True
        """Whether the router still listens to it."""
