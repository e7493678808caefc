"""What can go wrong with one call: values that a test chooses and the proxy carries out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    is_write: bool
    """Changes something: a dry run does not."""
    is_lease: bool
    number: int
    """How many writes there have been with this one, those to Leases apart."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The server answers no."""

    status: int
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection is reset without an answer; `is_applied`: after the server has done it."""

    is_applied: bool
    then: Callable[[], object] = lambda: None
    """Done at that moment, such as killing who has called."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The call reaches the server late."""

    seconds: float


Fault: TypeAlias = Refuse | Cut | Delay
