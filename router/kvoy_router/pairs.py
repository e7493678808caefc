"""Which engines could serve split requests together: those of one service and one revision.

A prefill engine hands its work to a serving engine as memory, so the two must compute alike: a pair
never crosses revisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvoy_contract.names import PREFILL_POOL, SERVING_POOL
from kvoy_router.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class RevisionPair:
    """One revision of one service that has ready engines in both pools."""

    service: str
    revision: str
    serving: tuple[str, ...]
    """Endpoint ids."""
    prefill: tuple[str, ...]


def pairs(endpoints: Iterable[Endpoint]) -> Sequence[RevisionPair]:
    """By service and revision; a revision that is ready in one pool alone has no pair."""
    ready: dict[tuple[str, str], dict[str, list[str]]] = {}
    for endpoint in endpoints:
        origin = endpoint.origin
        if origin.service and origin.revision and endpoint.is_ready:
            pools = ready.setdefault((origin.service, origin.revision), {})
            pools.setdefault(origin.pool, []).append(endpoint.id)
    return [
        RevisionPair(service, revision, tuple(pools[SERVING_POOL]), tuple(pools[PREFILL_POOL]))
        for (service, revision), pools in sorted(ready.items())
        if SERVING_POOL in pools and PREFILL_POOL in pools
    ]
