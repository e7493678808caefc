"""The comparison from end to end with tiny sizes, through the relay and Kvoy alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.event_loop import run
from kvoy_peers.comparison import compare
from kvoy_peers.config import PeersConfig
from kvoy_peers.environment import NotInstalled, install
from kvoy_peers.names import DIRECT, KVOY, RELAY


@pytest.mark.slow
def test_all_parts_measure_kvoy_and_the_relay_and_name_what_is_missing(tmp_path: Path) -> None:
    context = BenchContext("no-model", 1, tmp_path, lambda text: None, secret="s", is_smoke=True)
    config = PeersConfig(peers=("dynamo",), repeats=1, smoke=True, environments=str(tmp_path))
    (tmp_path / "uv").write_text("")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))  # where no uv can be run
        report = run(compare(config, context))

    who = {str(row[0]): str(row[3]) for row in report.tables[0].rows}
    assert who.pop("dynamo") == "not measured: uv is not on the PATH"
    assert who == {DIRECT: "measured", RELAY: "measured", KVOY: "measured"}
    assert report.figures[f"chunk_cpu_us.{KVOY}"] > 0
    assert report.figures[f"turn_cpu_us.32.{KVOY}"] > 0
    assert 0 < report.figures[f"hit_rate.hot spot.{KVOY}"] < 1
    assert {name.split(".")[1] for name in report.figures if name.startswith("spread.")} == {
        "shared prefix",
        "shared prefix after a sequential warm-up",
        "conversations",
        "no reuse",
        "hot spot",
    }


async def test_without_uv_a_peer_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(NotInstalled, match="uv"):
        await install("envoy", tmp_path)
