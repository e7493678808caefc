"""Rules between fields, each stated twice: in CEL for the API server, in Python for the operator.

The API server refuses an object that breaks one; the operator meets one only in an object that was
stored before the rule. A message names the field and says what to do. Tests hold the two statements
of every rule equal. A rule that compares with the stored object is the API server's alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvoy_operator.durations import Duration


@dataclass(frozen=True, slots=True)
class Rule:
    field: str
    """Path of the field at fault below the object with the rule, as in YAML; empty: the object."""
    message: str
    cel: str
    holds: Callable[[Any], bool] | None
    """The same about the parsed object; None for a rule about a change."""

    def to_schema(self) -> dict[str, str]:
        """One entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel, "message": self.message}
        return {**entry, "fieldPath": f".{self.field}"} if self.field else entry


def text_matches(field: str, attribute: str, pattern: str, message: str) -> Rule:
    """The text, if given, is one line and matches `pattern`, which RE2 and Python read alike."""
    compiled = re.compile(pattern)

    def holds(spec: Any) -> bool:
        text = getattr(spec, attribute)
        return text is None or ("\n" not in text and compiled.search(text) is not None)

    return Rule(field, message, f"!has(self.{field}) || self.{field}.matches(r'{pattern}')", holds)


def duration_within(field: str, attribute: str, least: str, most: str) -> Rule:
    """The duration, if given, lies between two others, both included."""
    shortest, longest = Duration(least).seconds, Duration(most).seconds

    def holds(spec: Any) -> bool:
        duration: Duration | None = getattr(spec, attribute)
        return duration is None or shortest <= duration.seconds <= longest

    value = f"duration(self.{field})"
    cel = f"!has(self.{field}) || {value} >= duration('{least}') && {value} <= duration('{most}')"
    return Rule(field, f"{field}: must be from {least} to {most}", cel, holds)


def only_grows(field: str, message: str) -> Rule:
    """The quantity is never lowered."""
    cel = (
        f"!has(self.{field}) || !has(oldSelf.{field}) || "
        f"quantity(string(self.{field})).compareTo(quantity(string(oldSelf.{field}))) >= 0"
    )
    return Rule(field, message, cel, None)


def never_changes(field: str, message: str) -> Rule:
    """The field keeps its value, also that of not being there."""
    cel = (
        f"has(self.{field}) == has(oldSelf.{field}) && "
        f"(!has(self.{field}) || self.{field} == oldSelf.{field})"
    )
    return Rule(field, message, cel, None)
