"""Runs one part of a stack as a child process that never outlives the `kvoy up` which started it.

The parent holds the other end of our standard input and never writes: end of file means that it is
gone, however it died. Then this process gets its own SIGTERM, and after a grace period the whole
process group (ours: the parent starts us in a session of our own) is killed. Linux is asked for the
same signal, which arrives even while no Python code runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from kvoy_cli.__main__ import COMMANDS
from kvoy_cli.__main__ import main as kvoy

ORPHAN_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Run `kvoy ARGV...` for the parent that holds our standard input."""
    assert argv[0] in COMMANDS, argv
    watch_parent()
    return kvoy(argv)


def watch_parent() -> None:
    """From now on, end when the process that holds our standard input has ended."""
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    _ask_for_parent_death_signal()


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _ask_for_parent_death_signal() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
