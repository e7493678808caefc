"""Why a model cannot be had, in one sentence for the person who asked for it.

Raised by the model store and what it uses (hub, GGUF conversion); `kvoy` shows it without a
traceback.
"""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """What a program may want to tell apart; the value is the exit status of `kvoy model fetch`."""

    OTHER = 1
    NOT_FOUND = 3
    """The hub has no such model, revision or file."""
    NOT_ALLOWED = 4
    """The token is missing, wrong, or may not read the model."""
    RATE_LIMITED = 5
    UNREACHABLE = 6
    """No answer, a broken connection, or a failure of the hub itself: a later try may succeed."""
    NO_SPACE = 7
    DAMAGED = 8
    """What came is not what the hub's checksums say."""


class ModelSourceError(Exception):
    """The reference is wrong, or its source cannot be reached, read, verified or stored."""

    def __init__(self, message: str, cause: Cause = Cause.OTHER) -> None:
        super().__init__(message)
        self.cause = cause
