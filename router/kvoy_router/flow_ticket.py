"""One request's place in flow control, and the limits that it waits under.

Sizes are in tokens, times in seconds on the caller's clock."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLimits:
    """Of one queue. Raises ValueError, naming the field, for a value that cannot work."""

    max_engine_wait_s: float = 1.0
    """A request goes on while some engine would begin with it within so long. Enough for an engine
    never to run dry between two reports, and little to wait behind."""
    shared_wait: float = 0.2
    """Share of `max_engine_wait_s` that is left to a tenant that uses more than its share, and to a
    class while a more important one is served: the rest is kept free for the others."""
    max_waiting: int = 8192
    """Requests; 429 beyond. 0: none waits."""
    max_waiting_per_tenant: int = 8192
    max_waiting_per_priority: int = 8192
    max_waiting_s: float = 300.0
    """429 for who has waited so long. As long as an engine may take to begin with its answer."""
    age_s: float = 5.0
    """A less important request that has waited so long takes part in `aged_share`."""
    aged_share: float = 0.125
    """Share of all tokens that goes to aged requests of less important classes while there are
    any."""
    max_held: int = 256
    """Requests that wait for the first engine of a model; 503 beyond."""
    max_held_s: float = 10.0
    """503 for who has waited so long for an engine to be there at all. 0: at once."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (0 <= value < math.inf):
                raise ValueError(f"{field.name}: must be at least 0, not {value:g}")
        for name in ("max_engine_wait_s", "max_waiting_s"):
            if not getattr(self, name):
                raise ValueError(f"{name}: must be above 0")
        for name in ("shared_wait", "aged_share"):
            if getattr(self, name) > 1.0:
                raise ValueError(f"{name}: must be at most 1, not {getattr(self, name):g}")
        if self.aged_share == 0.0:
            raise ValueError("aged_share: must be above 0, or a class could wait for ever")


class Line(NamedTuple):
    """Whose engines a request waits for; each has a queue of its own."""

    model: str
    service: str = ""
    """Where several services share the model's traffic, the one that the request falls to: another
    one's room is none for it."""


class Stage(enum.Enum):
    """NEW → (WAITING →) CHOSEN → STARTED → ENDED; each may end at once."""

    NEW = enum.auto()
    WAITING = enum.auto()
    CHOSEN = enum.auto()
    """It may go on, and has not reserved its load at an engine yet."""
    STARTED = enum.auto()
    ENDED = enum.auto()


class Ticket:
    """Owned by the request's task; the queue of its line changes it."""

    __slots__ = (
        "arrived_s",
        "deadline_s",
        "is_modest",
        "line",
        "priority",
        "stage",
        "tenant",
        "tokens",
        "weight",
    )

    def __init__(
        self,
        line: Line,
        *,
        tokens: float,
        arrived_s: float,
        deadline_s: float = math.inf,
        tenant: str = "",
        priority: int = 0,
        weight: float = 1.0,
    ) -> None:
        """`tokens` is the estimated cost: prompt to compute and answer to write, at least 1."""
        assert tokens >= 1.0, "every request costs something"
        assert weight > 0.0, "a share of nothing cannot be served"
        self.line = line
        self.tenant = tenant
        self.priority = priority
        """Lower goes first."""
        self.weight = weight
        """Of the tenant's share against others of its class."""
        self.tokens = tokens
        """What the tenant is charged for it, as known so far."""
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.stage = Stage.NEW
        self.is_modest = True
        """When it went on: whether nothing more important was here, and its tenant used no more
        than its share."""

    @property
    def model(self) -> str:
        return self.line.model

    @property
    def engine_priority(self) -> int:
        """Inside an engine, lower first: who is beyond its share lets others of its class pass, so
        that the engine may have work queued and nobody waits behind it."""
        return 2 * self.priority + (not self.is_modest)

    def __repr__(self) -> str:
        return f"Ticket({self.model}, {self.tenant!r}, {self.priority}, {self.stage.name})"
