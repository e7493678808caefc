"""Which of several services that serve one model name gets a request: shares by weight, sticky by
the beginning of the prompt.

Weighted rendezvous hashing: each service draws a number from (its name, the prompt's beginning),
and the least one wins. So every router and every later turn of a conversation comes to the same
choice without memory, a change of weights moves only the share that has to move, and who cannot
serve passes its share on to the others in proportion. A service of weight 0 comes after all others:
it gets traffic only while nobody else can serve."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvoy_contract.fleet import DEFAULT_WEIGHT

_UNIT = 2.0**-64


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One service as the pool knows it."""

    name: str
    model: str
    weight: int = DEFAULT_WEIGHT


def order(weights: Mapping[str, int], names: Iterable[str], affinity: bytes) -> Sequence[str]:
    """`names` by preference for prompts that begin with `affinity`; one without a weight has the
    default."""
    return sorted(names, key=lambda name: _rank(name, weights.get(name, DEFAULT_WEIGHT), affinity))


def mismatch(service: Service | None, told: Sequence[str]) -> str | None:
    """How the model names that an engine tells differ from what its service is to serve."""
    if service is None or service.model in told:
        return None
    names = ", ".join(told)
    return f"it serves {names}, the service {service.name} is to serve {service.model}"


def _rank(name: str, weight: int, affinity: bytes) -> tuple[bool, float, str]:
    digest = hashlib.blake2b(b"%b\0%b" % (name.encode(), affinity), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) * _UNIT
    # The first of exponential clocks that run at the speeds `weight` rings for each with the
    # probability weight ÷ sum.
    return weight == 0, -math.log(uniform) / (weight or 1), name
