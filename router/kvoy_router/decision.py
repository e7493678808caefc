"""The one product of a pick: which engine, under which lease, and why not the others."""

from __future__ import annotations

from typing import Any

import msgspec

from kvoy_router.cost import Cost
from kvoy_router.endpoint import Endpoint
from kvoy_router.filters import Rejection
from kvoy_router.lease import Lease


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """How one endpoint looked to the policy."""

    endpoint_id: str
    cached_tokens: int
    num_requests: float
    """Running and waiting, own reservations included."""
    is_known: bool
    score: float
    """What the policy minimised: seconds for `kv-aware`, requests for `least-load`, else 0."""
    cost: Cost | None = None


class Decision(msgspec.Struct, frozen=True, gc=False):
    request_id: str
    model: str
    policy: str
    endpoint: Endpoint
    lease: Lease
    cached_tokens: int
    """Prompt tokens that the endpoint is predicted to hold already."""
    best_cached_tokens: int
    """The most that any candidate holds."""
    now_s: float
    prompt_tokens: int = 0
    stride: int = 0
    """Tokens: so fine is what is known about caches."""
    predicted_ttft_s: float | None = None
    """From this decision to the first token; None where the engine's load is not known."""
    cached_tokens_in_turn: int = 0
    """What the engine that round-robin would have taken holds of the prompt."""
    candidates: tuple[Candidate, ...] = ()
    rejected: tuple[Rejection, ...] = ()

    @property
    def reason(self) -> str:
        """One line for the log: `engine-1 cached=6000 cost=0.52s; engine-2 cached=0 cost=0.90s`."""
        parts = [
            f"{c.endpoint_id} cached={c.cached_tokens} requests={c.num_requests:.0f}"
            f" score={c.score:.3f}"
            for c in self.candidates
        ]
        parts += [f"{endpoint_id} {reason}" for endpoint_id, reason in self.rejected]
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """For `/debug/decisions`."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "policy": self.policy,
            "endpoint": self.endpoint.id,
            "engine": self.endpoint.name,
            "service": self.endpoint.origin.service or None,
            "number": self.lease.number,
            "prompt_tokens": self.prompt_tokens,
            "predicted_ttft_s": self.predicted_ttft_s,
            "cached_tokens": self.cached_tokens,
            "cached_tokens_in_turn": self.cached_tokens_in_turn,
            "best_cached_tokens": self.best_cached_tokens,
            "time_s": self.now_s,
            "candidates": [msgspec.to_builtins(candidate) for candidate in self.candidates],
            "rejected": [{"endpoint": name, "reason": why} for name, why in self.rejected],
        }
