"""Panels and alerts against a real Prometheus and a stack with traffic; it dies piece by piece."""

from __future__ import annotations

import pytest

from kvoy_monitoring.__main__ import DASHBOARDS
from kvoy_monitoring.testing import Observed, panels_without_data, wait_for

pytestmark = pytest.mark.slow

LIMIT_S = 180.0
OF_THE_OPERATOR = "kvoy_operator_"


def test_every_panel_of_routers_and_engines_has_data(observed: Observed) -> None:
    """The operator's panels are looked at where an operator runs."""
    running = "min(kvoy_engine_running_sequences) > 0"
    wait_for(lambda: observed.query(running), "both engines are busy", LIMIT_S)
    missing: list[str] = []

    def look() -> bool:
        missing[:] = panels_without_data(
            observed.query, DASHBOARDS, lambda expr: OF_THE_OPERATOR not in expr
        )
        return not missing

    with observed.begun_stream() as engine:
        engine.kill()  # so that attempts fail and are retried, and this stream has to go on
        try:
            wait_for(look, "every panel has data", LIMIT_S)
        except AssertionError:
            pytest.fail("no data:\n" + "\n".join(missing))


def test_alerts_fire_when_the_engines_die(observed: Observed) -> None:
    for engine in observed.engines:
        engine.kill()

    wanted = {"KvoyRouterHasNoEngine", "KvoyTelemetryLost", "KvoyErrorRatioHigh"}
    wait_for(lambda: wanted <= observed.alerts(), f"{wanted} fire", LIMIT_S)
