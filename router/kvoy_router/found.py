"""An engine as some discovery has found it: where it listens, and whose it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoy_router.config import EngineAddress
from kvoy_router.endpoint import Origin


@dataclass(frozen=True, slots=True)
class FoundEngine:
    address: EngineAddress
    origin: Origin = field(default_factory=Origin)
    is_draining: bool = False
    """It is going away: what it has may end there, nothing new is sent."""
