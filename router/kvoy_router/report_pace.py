"""How often engines are asked to report: the more of them, the less often each. Pure.

A report costs a router about a tenth of a millisecond, nearly all of it in gRPC (`kvoy bench
reports`), and each router hears of every engine. Engines take turns in one budget, so that what a
router spends on reports does not grow with its fleet.
"""

from __future__ import annotations

LONGEST_S = 1.0
"""An engine's heartbeat: no interval is longer."""
SHORTEST_S = 0.025
"""Engines keep to about this by themselves: no need to ask for less."""
_WORTH_SAYING = 1.25
"""How far the interval is off until engines hear of another one."""


def interval_s(num_engines: int, max_reports_per_s: float) -> float:
    """Between two reports of one engine; 0: as often as it likes."""
    wanted_s = num_engines / max_reports_per_s
    return min(wanted_s, LONGEST_S) if wanted_s > SHORTEST_S else 0.0


class ReportPace:
    """What one engine has been asked for on its stream."""

    __slots__ = ("_asked_s", "_max_reports_per_s")

    def __init__(self, max_reports_per_s: float) -> None:
        self._max_reports_per_s = max_reports_per_s
        self._asked_s = 0.0

    def next_s(self, num_engines: int) -> float | None:
        """The interval to ask for now; None: what it was asked for will do."""
        wanted_s = interval_s(num_engines, self._max_reports_per_s)
        asked_s = self._asked_s
        if wanted_s == asked_s:
            return None
        if asked_s and wanted_s and asked_s / _WORTH_SAYING < wanted_s < asked_s * _WORTH_SAYING:
            return None
        self._asked_s = wanted_s
        return wanted_s
