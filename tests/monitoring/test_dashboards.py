"""The dashboards as files: current, small enough, with expressions that parse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import promql_parser
import pytest

from kvoy_monitoring.__main__ import DASHBOARDS, files, main
from kvoy_monitoring.panel import Panel
from kvoy_monitoring.testing import as_grafana_asks

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "charts/kvoy"
PANELS = [(spec.title, panel) for spec in DASHBOARDS for panel in spec.panels]


def test_the_chart_s_dashboards_and_rules_are_current() -> None:
    assert main(["--check", str(CHART)]) == 0


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    main([str(tmp_path)])
    path = tmp_path / "dashboards/kvoy-fleet.json"
    path.write_text(path.read_text().replace("Fleet", "Flood"))

    assert main(["--check", str(tmp_path)]) == 1


def test_each_dashboard_fits_into_a_config_map() -> None:
    for name, text in files().items():
        assert len(text.encode()) < 500_000, name


@pytest.mark.parametrize("spec", DASHBOARDS, ids=lambda spec: spec.uid)
def test_the_data_source_is_a_variable(spec: object) -> None:
    text = next(text for name, text in files().items() if f"/{spec.uid}.json" in name)  # type: ignore[attr-defined]

    uids = {
        line.split(":", 1)[1].strip(' ",')
        for line in text.splitlines()
        if '"uid"' in line and "kvoy-" not in line
    }
    assert uids == {"${datasource}"}


@pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[f"{title}: {p.title}" for title, p in PANELS]
)
def test_every_expression_parses(panel: Panel) -> None:
    assert panel.description
    assert panel.queries
    for query in panel.queries:
        promql_parser.parse(as_grafana_asks(query.expr))


def test_the_generator_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvoy_monitoring", str(tmp_path)],
        env={"PYTHONPATH": str(ROOT / "deploy/monitoring"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.rglob("*.json")} == {f"{s.uid}.json" for s in DASHBOARDS}
