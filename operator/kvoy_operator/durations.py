"""Lengths of time as the Gateway API writes them: `500ms`, `90s`, `1h30m`.

That form is a subset of what Go's `time.ParseDuration` and the API server's CEL `duration()` read.
"""

from __future__ import annotations

import math
import re
from typing import Final

DURATION_PATTERN: Final = r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"
MAX_DURATION_LENGTH: Final = 28

_DURATION = re.compile(r"([0-9]{1,5}(h|m|s|ms)){1,4}")
_PART = re.compile(r"([0-9]+)(h|ms|m|s)")
_UNIT_MS: Final = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}


class Duration(str):
    """A length of time that keeps the text in which it was written."""

    __slots__ = ("_milliseconds",)
    _milliseconds: int

    def __new__(cls, text: str) -> Duration:
        """Raises ValueError for text of another form."""
        if _DURATION.fullmatch(text) is None:
            raise ValueError(f"{text!r} is not a duration such as 90s, 30m or 1h30m")
        duration = super().__new__(cls, text)
        duration._milliseconds = sum(
            int(number) * _UNIT_MS[unit] for number, unit in _PART.findall(text)
        )
        return duration

    @property
    def seconds(self) -> float:
        return self._milliseconds / 1000

    @property
    def whole_seconds(self) -> int:
        """Rounded up, for the fields of Kubernetes that take nothing finer."""
        return math.ceil(self._milliseconds / 1000)
