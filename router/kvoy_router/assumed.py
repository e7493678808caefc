"""Blocks that an engine is assumed to hold because a request with them has just been sent there.

Without it every request of a burst with one new prefix would look cold everywhere until telemetry
has gone round. An assumption ends when telemetry speaks of the block, or with its lease; after a
request that did compute its prompt it outlives the lease by the time that telemetry may take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

GRACE_S = 2.0
"""After the end of a lease: a load report comes at least each second, block events before it."""


class Assumed:
    """Hash → set of endpoints as bits, beside the index of what is known."""

    def __init__(self) -> None:
        self._sets: dict[int, int] = {}
        self._by_slot: dict[int, set[int]] = {}
        self._expiring: deque[tuple[float, int, Sequence[int]]] = deque()

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def sets(self) -> Mapping[int, int]:
        return self._sets

    def claim(self, slot: int, keys: Iterable[int]) -> None:
        bit = 1 << slot
        held = self._by_slot.setdefault(slot, set())
        for key in keys:
            self._sets[key] = self._sets.get(key, 0) | bit
            held.add(key)

    def drop(self, slot: int, keys: Iterable[int]) -> None:
        """Telemetry has spoken of these, or their lease has ended; unknown ones are ignored."""
        held = self._by_slot.get(slot)
        if not held:
            return
        bit = 1 << slot
        for key in keys:
            if key in held:
                held.discard(key)
                rest = self._sets[key] & ~bit
                if rest:
                    self._sets[key] = rest
                else:
                    del self._sets[key]
        if not held:
            del self._by_slot[slot]

    def drop_all(self, slot: int) -> None:
        self.drop(slot, list(self._by_slot.get(slot, ())))

    def drop_later(self, slot: int, keys: Sequence[int], now_s: float) -> None:
        self._expiring.append((now_s + GRACE_S, slot, keys))

    def expire(self, now_s: float) -> None:
        while self._expiring and self._expiring[0][0] <= now_s:
            _, slot, keys = self._expiring.popleft()
            self.drop(slot, keys)
