"""The operator's panels against a real operator, a real API server and a real Prometheus."""

from __future__ import annotations

import itertools
from pathlib import Path

import httpx
import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_monitoring.__main__ import DASHBOARDS
from kvoy_monitoring.testing import Target, panels_without_data, prometheus, query, wait_for
from kvoy_operated import Site

pytestmark = pytest.mark.slow

LIMIT_S = 240.0
OF_THE_OPERATOR = "kvoy_operator_"


def test_every_panel_of_the_operator_has_data(
    api_server: ApiServer, kvoy_crds: None, tmp_path: Path
) -> None:
    site = Site(api_server, tmp_path)
    missing: list[str] = []
    rounds = itertools.count()
    try:
        operator = site.start_operator()
        operator.wait_until_leading()
        targets = [Target(operator.port, {"namespace": "kvoy-system", "pod": "operator-0"})]
        with prometheus(tmp_path, targets, {"groups": []}) as address, httpx.Client() as client:

            def look() -> bool:
                # Changes make it write, and a template that no server takes makes a refused call.
                number = next(rounds)
                site.apply("qwen", replicas=1 + number % 3)
                volume = {"name": "x", "hostPath": {"path": f"/{number}", "type": "Nonsense"}}
                site.apply("odd", engine={"podTemplate": {"spec": {"volumes": [volume]}}})
                missing[:] = panels_without_data(
                    lambda expr: query(client, address, expr),
                    DASHBOARDS,
                    lambda expr: OF_THE_OPERATOR in expr,
                )
                return not missing

            wait_for(look, "every panel has data", LIMIT_S)
    except AssertionError as error:
        error.add_note("no data:\n" + "\n".join(missing))
        raise
    finally:
        site.close()
