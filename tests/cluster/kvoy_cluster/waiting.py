"""Waiting for what a cluster does in its own time: polling with a deadline, never a bare sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_INTERVAL_S = 0.1


def wait_for(
    check: Callable[[], T | None],
    what: str,
    timeout_s: float = 60.0,
    *,
    unless: Callable[[], str | None] = lambda: None,
) -> T:
    """What `check` gives as soon as that is true; what it raises counts as "not yet".

    `unless` says why waiting is in vain, e.g. that the awaited process has ended. Raises
    TimeoutError naming `what`, with the last error or value, and RuntimeError for `unless`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        cause: Exception | None = None
        seen: object = None
        try:
            seen = value = check()
            if value:
                return value
        except Exception as error:
            cause = error
        if reason := unless():
            raise RuntimeError(f"{what}: {reason}") from cause
        if time.monotonic() > deadline:
            last = repr(cause) if cause is not None else repr(seen)
            raise TimeoutError(f"{what}: not within {timeout_s:g} s; last: {last}") from cause
        time.sleep(_INTERVAL_S)
