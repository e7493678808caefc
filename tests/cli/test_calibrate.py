"""Real against virtual time, with tiny sizes; and the report of figures made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoy_cli.bench.calibrate import SMOKE, simulated_engines
from kvoy_cli.bench.calibrate_report import Fitted, Pair, Sizes, build_report
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.outcome import LoadFigures
from kvoy_cli.bench.step_fit import StepLaw
from kvoy_engine.timing_model import TimingModel
from kvoy_simulate.measures import Measures


def pair(real: float, virtual: float) -> Pair:
    """All figures of each world have this value."""
    return Pair(
        LoadFigures(**dict.fromkeys(LoadFigures.__dataclass_fields__, real)),  # type: ignore[arg-type]
        Measures(**dict.fromkeys(Measures.__struct_fields__, virtual)),  # type: ignore[arg-type]
    )


def test_errors_are_the_median_ratios_distance_from_one() -> None:
    law = StepLaw(TimingModel(), 0.001)
    real = [pair(1.0, 1.1), pair(1.0, 0.5), pair(1.0, 1.3)]
    fitted = [Fitted(law, one, [0.1, -0.2]) for one in real]
    simulated = [pair(2.0, 1.7)]

    report = build_report(Sizes(), fitted, simulated)

    errors = {goal.name: goal.figure for goal in report.goals}
    assert errors["real engine, TTFT p90: error"] == pytest.approx(0.1)
    assert errors["simulated engines, throughput: error"] == pytest.approx(0.15)
    assert [goal.name for goal in report.missed] == ["simulated engines, throughput: error"]


@pytest.mark.slow
async def test_both_worlds_get_the_same_requests(tmp_path: Path) -> None:
    context = BenchContext("sim", 1, tmp_path, lambda text: None, secret="s", is_smoke=True)

    (measured,) = await simulated_engines(context, SMOKE)

    assert measured.real.num_errors == 0
    assert measured.virtual.requests == measured.real.num_requests > 0
    assert measured.virtual.lost == 0
