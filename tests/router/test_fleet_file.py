"""The file that says whose engines a router may use, and the configuration around it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoy_contract.fleet import Fleet, FleetService, render_fleet
from kvoy_router.config import RouterConfig
from kvoy_router.fleet_file import FleetFile

ONE = Fleet(services=(FleetService(name="a", uid="u", model="m", secret="hidden"),))
NONE = Fleet(services=())


def mount(folder: Path, generation: int, text: str) -> None:
    """Replace the file as the kubelet replaces a Secret's: by another target of a link."""
    data = folder / f"..{generation}"
    data.mkdir()
    (data / "fleet.yaml").write_text(text)
    (folder / "..tmp").symlink_to(data.name)
    os.replace(folder / "..tmp", folder / "..data")
    if not (folder / "fleet.yaml").is_symlink():
        (folder / "fleet.yaml").symlink_to("..data/fleet.yaml")


def test_a_mounted_file_is_read_again_when_it_is_replaced(tmp_path: Path) -> None:
    seen: list[Fleet] = []
    mount(tmp_path, 1, render_fleet(ONE))
    file = FleetFile(tmp_path / "fleet.yaml", seen.append)

    file.check()
    file.check()
    mount(tmp_path, 2, render_fleet(NONE))
    file.check()

    assert seen == [ONE, NONE]


def test_a_bad_file_keeps_the_services_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen: list[Fleet] = []
    path = tmp_path / "fleet.yaml"
    file = FleetFile(path, seen.append)

    file.check()
    assert seen == []
    path.write_text(render_fleet(ONE))
    file.check()
    assert seen == [ONE]
    path.write_text("services: [{name: a}]")
    file.check()
    file.check()

    assert seen == [ONE]
    assert file.error is not None
    assert caplog.text.count("fleet file is unusable") == 2
    assert "hidden" not in caplog.text
    path.write_text(render_fleet(ONE))
    file.check()
    assert file.error is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "engine: give at least one"),
        ({"kubernetes": True}, "fleet_file: --kubernetes needs it"),
        ({"engine": ("h:1",), "fleet_file": "f"}, "fleet_file: counts only with --kubernetes"),
        ({"engine": ("h:1",), "kubernetes_namespace": "n"}, "kubernetes_namespace: counts only"),
    ],
)
def test_flags_that_do_not_belong_together_name_themselves(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(**settings)


@pytest.mark.slow
def test_a_router_without_a_cluster_says_so(tmp_path: Path) -> None:
    flags = ["--kubernetes", "--fleet-file", "f", "--port", "0"]

    ended = subprocess.run(
        [sys.executable, "-m", "kvoy_router", *flags],
        env=os.environ | {"KUBECONFIG": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 1
    assert "--kubernetes: no configuration of a cluster" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
