"""Which cgroups a node gets; what the kernel makes of them is seen in `test_cluster.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoy_cluster import cgroups


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    return tmp_path


def test_with_version_1_a_node_has_a_group_in_every_hierarchy(root: Path) -> None:
    for hierarchy in ("memory", "pids"):
        (root / hierarchy).mkdir()
        (root / hierarchy / "cgroup.procs").touch()
    (root / "no-hierarchy").mkdir()

    cgroups.create("a1b2c3", "n1")

    groups = sorted(str(path.relative_to(root)) for path in root.glob("*/kvoy-*"))
    assert groups == ["memory/kvoy-a1b2c3-n1", "pids/kvoy-a1b2c3-n1"]


def test_with_version_2_the_kubelet_may_use_every_controller(root: Path) -> None:
    (root / "cgroup.controllers").write_text("cpu memory pids\n")

    cgroups.create("a1b2c3", "n1")

    delegated = [root, root / "kvoy-a1b2c3-n1"]
    for folder in delegated:
        assert (folder / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_the_groups_of_one_run_are_removed_with_all_below_them(root: Path) -> None:
    memory = root / "memory"
    (memory / "kvoy-a1b2c3-n1" / "kubepods" / "pod1").mkdir(parents=True)
    (memory / "kvoy-ffffff-n1").mkdir()
    (memory / "cgroup.procs").touch()

    assert cgroups.remove("a1b2c3")

    assert [path.name for path in memory.iterdir() if path.is_dir()] == ["kvoy-ffffff-n1"]
