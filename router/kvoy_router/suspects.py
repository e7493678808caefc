"""Requests that have killed engines: they are watched, and refused for a while, when they come
again.

Of one request `failover` stops at the second engine that dies while it begins. But many clients
send a failed request again by themselves, and each time it would kill two more. So one that was
suspect may be tried again, and the next engine that dies of it is the last for `PAUSE_S`. Whether
engines died of a request or of something else nobody can tell: therefore the pause is short, and a
request that many clients send, such as a probe, is answered soon after an outage has ended.

Every router replica remembers for itself."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from kvoy_contract.errors import UpstreamFailed

PAUSE_S = 30.0
_MEMORY_S = 300.0
"""From the last engine that died of it until it is forgotten."""
_MAX_SUSPECTS = 1024


class Suspects:
    """Equal bodies are one request. Time is seconds on the caller's clock."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """When it was suspect last, and until when it is refused."""

    def __len__(self) -> int:
        return len(self._known)

    def add(self, body: bytes, was_suspect: bool, now_s: float) -> None:
        """As many engines have died of this request as may. `was_suspect`: already when it began;
        copies of one request that fail together are one offence."""
        key = _key(body)
        _, until_s = self._known.get(key, (now_s, now_s))
        self._known[key] = (now_s, now_s + PAUSE_S if was_suspect else until_s)
        self._known.move_to_end(key)
        if len(self._known) > _MAX_SUSPECTS:
            self._known.popitem(last=False)

    def check(self, body: bytes, now_s: float) -> int:
        """How many engines count as killed by it before it is tried. Raises UpstreamFailed while
        it is not to be tried."""
        if not self._known:
            return 0
        key = _key(body)
        since_s, until_s = self._known.get(key, (now_s, now_s))
        if now_s - since_s >= _MEMORY_S:
            del self._known[key]
        if key not in self._known:
            return 0
        if now_s < until_s:
            raise UpstreamFailed(
                "Engines have failed time and again while they began this very request. It is not "
                f"tried again for {until_s - now_s:.0f} s.",
                code="suspect",
                retry_after_s=until_s - now_s,
            )
        return 1


def _key(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
