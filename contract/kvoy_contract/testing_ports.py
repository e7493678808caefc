"""Ports for processes that cannot be told to take any free one, in tests."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence

# Below what systems hand out to connections (Linux from 32768): none can take such a port between
# this look and the process that listens on it.
_RANGE = range(20_000, 30_000)
_TRIES = 200
_given: set[int] = set()
"""To this process, so that two that a test asks for are not the same: whoever is to listen on the
first may not do so yet."""


def free_port(offsets: Sequence[int] = (0,)) -> int:
    """A port on loopback that is free, as are those at `offsets` above it: each is given once."""
    ports = _own_ports()
    bases = ports[: len(ports) - max(offsets)]
    for _ in range(_TRIES if bases else 0):
        base = random.SystemRandom().choice(bases)
        wanted = {base + offset for offset in offsets}
        if wanted & _given:
            continue
        try:
            for port in wanted:
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        _given.update(wanted)
        return base
    raise OSError(f"no free ports at offsets {tuple(offsets)} in {ports}")


def _own_ports() -> range:
    """A share of its own for each of pytest's workers: they look at the same time."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker:
        return _RANGE
    count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    size = len(_RANGE) // count
    # One that replaces a crashed worker has a higher number.
    start = int(worker.removeprefix("gw")) % count * size
    return _RANGE[start : start + size]
