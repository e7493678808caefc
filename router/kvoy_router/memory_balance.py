"""How much of a router's memory is left for requests.

Nobody can count all that a process holds: modules, tokenizers, indexes, what its allocator keeps.
So the kernel is asked what is resident, and what is counted for requests is taken off: the rest is
everything else, and what that leaves of the limit is for requests. While more is counted for
requests than they really hold, everything else looks smaller than it is; therefore the largest that
it was is forgotten only slowly. Pure: the caller measures.
"""

from __future__ import annotations

from kvoy_router.body_memory import Budget

MIB = 1024 * 1024
USABLE = 0.9
"""Of the limit. The rest is for what the kernel holds for a process, sockets' buffers above all,
and for what grows between two looks."""
LOOK_S = 0.25
_KEPT_A_LOOK = 0.99
"""Half of a peak of everything else is forgotten in 17 s."""
_LEAST_SHARE = 1 / 16
"""Of the limit, for small requests, however much else has grown."""
_MOST_BYTES = 2048 * MIB
_CACHE_SHARE = 1 / 8
_CACHE_BYTES = 256 * MIB


class MemoryBalance:
    """`limit_bytes`: of the process; None: nobody limits it."""

    def __init__(self, limit_bytes: int | None, machine_bytes: int, idle_bytes: int) -> None:
        """`idle_bytes`: what is resident when the router starts."""
        self._limit_bytes = limit_bytes
        self._machine_bytes = machine_bytes
        self._idle_bytes = idle_bytes
        self.other_bytes = float(idle_bytes)
        """Everything that is not counted for requests."""
        self.told_bytes: int | None = None
        """For requests, at most; None: what there is. May be replaced at any time."""

    def look(self, resident_bytes: int, used_bytes: int) -> None:
        """`used_bytes`: what is counted for requests. Comes every `LOOK_S`."""
        other = float(max(resident_bytes - used_bytes, self._idle_bytes))
        self.other_bytes = max(other, self.other_bytes * _KEPT_A_LOOK)

    @property
    def budget(self) -> Budget:
        return Budget(
            now=self._left(self.other_bytes),
            most=self._left(self._idle_bytes),
            least=int((self._limit_bytes or 0) * _LEAST_SHARE),
        )

    def cache_bytes(self, told_mib: int | None) -> int:
        """Of something that may be full for good: as told, or 256 MiB, or an eighth of the limit
        where that is less."""
        if told_mib is not None:
            return told_mib * MIB
        if self._limit_bytes is None:
            return _CACHE_BYTES
        return min(_CACHE_BYTES, int(self._limit_bytes * _CACHE_SHARE))

    def _left(self, other_bytes: float) -> int:
        if self._limit_bytes is not None:
            left = max(0, int(self._limit_bytes * USABLE - other_bytes))
            return left if self.told_bytes is None else min(left, self.told_bytes)
        if self.told_bytes is not None:
            return self.told_bytes
        return min(self._machine_bytes // 4, _MOST_BYTES)
