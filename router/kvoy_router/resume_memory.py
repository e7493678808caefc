"""What a router remembers of all its streams together, so that others can go on with them: bounded,
and counted in steps, so that a chunk costs no accounting."""

from __future__ import annotations

STEP_BYTES = 1024
"""About 80 tokens."""


class ResumeMemory:
    """One for all streams of a router."""

    __slots__ = ("max_bytes", "num_refused", "used_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        """May be replaced at any time; what is in use stays."""
        self.used_bytes = 0
        self.num_refused = 0
        """Streams that found no room, and cannot be resumed."""

    def take(self) -> bool:
        """One further step for a stream, or False: there is no room."""
        if self.used_bytes + STEP_BYTES > self.max_bytes:
            self.num_refused += 1
            return False
        self.used_bytes += STEP_BYTES
        return True

    def give_back(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0, "given back more than was taken"
