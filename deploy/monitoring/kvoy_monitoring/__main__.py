"""`python -m kvoy_monitoring [--check] CHART`: writes the chart's dashboards and rules.

`--check` writes nothing and fails when a committed file differs from what would be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from kvoy_monitoring import engines, fleet, operator_health, service
from kvoy_monitoring.panel import build
from kvoy_monitoring.rules import ALERTS, RECORDINGS

DASHBOARDS = (fleet.DASHBOARD, service.DASHBOARD, engines.DASHBOARD, operator_health.DASHBOARD)


def files() -> dict[str, str]:
    """Every generated file's text, by its path within the chart."""
    made = {
        f"dashboards/{spec.uid}.json": JSONEncoder(sort_keys=True, indent=2).encode(
            build(spec).build()
        )
        + "\n"
        for spec in DASHBOARDS
    }
    made["rules/kvoy.yaml"] = yaml.safe_dump(rule_groups(), sort_keys=False, width=120)
    return made


def rule_groups() -> dict[str, Any]:
    """The content of a Prometheus rule file, and of a PrometheusRule's spec."""
    return {
        "groups": [
            {"name": "kvoy.recording", "rules": [rule.to_dict() for rule in RECORDINGS]},
            {"name": "kvoy.alerts", "rules": [alert.to_dict() for alert in ALERTS]},
        ]
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvoy_monitoring", description=__doc__)
    parser.add_argument("chart", type=Path, help="the chart's folder")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args(argv)
    stale = []
    for name, text in files().items():
        path = arguments.chart / name
        if arguments.check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(str(path))
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if stale:
        print(f"not current: {', '.join(stale)}; run make monitoring", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
