"""Ports for processes that cannot be told to take any free one, in tests."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

# Below what systems hand out to connections (Linux from 32768): none can take such a port between
# this look and the process that listens on it.
_RANGE = range(20_000, 30_000)
_TRIES = 200


def free_port(offsets: Sequence[int] = (0,)) -> int:
    """A port on loopback that is free, as are those at `offsets` above it."""
    for _ in range(_TRIES):
        base = random.SystemRandom().choice(_RANGE)
        try:
            for offset in offsets:
                socket.create_server(("127.0.0.1", base + offset)).close()
        except OSError:
            continue
        return base
    raise OSError(f"no free ports in {_RANGE}")
