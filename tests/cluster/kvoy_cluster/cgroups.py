"""The cgroups of a cluster's nodes: `/kvoy-<run>-<node>`, on hosts with cgroup v1 or v2."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_PREFIX = "kvoy"


def is_v2() -> bool:
    """Whether the host has the unified hierarchy only."""
    return (ROOT / "cgroup.controllers").exists()


def name(run: str, node: str) -> str:
    return f"{_PREFIX}-{run}-{node}"


def create(run: str, node: str) -> None:
    """An empty cgroup for a node, in each hierarchy. Needs root."""
    for hierarchy in _hierarchies():
        group = hierarchy / name(run, node)
        group.mkdir(exist_ok=True)
        if is_v2():
            _delegate_controllers(group)
        elif (group / "cpuset.cpus").exists():
            # A new cpuset is empty, and takes no process before it has both.
            for file in ("cpuset.cpus", "cpuset.mems"):
                (group / file).write_text((hierarchy / file).read_text())


def _delegate_controllers(group: Path) -> None:
    """Lets the kubelet make children of `group` with every controller that the host has."""
    controllers = (ROOT / "cgroup.controllers").read_text().split()
    wanted = " ".join(f"+{controller}" for controller in controllers)
    for folder in (ROOT, group):
        (folder / "cgroup.subtree_control").write_text(wanted)


def remove(run: str) -> bool:
    """Removes all cgroups of a run. Raises OSError while processes are still in one."""
    for hierarchy in _hierarchies():
        for group in hierarchy.glob(f"{_PREFIX}-{run}-*"):
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()
    return True


def _hierarchies() -> list[Path]:
    if is_v2():
        return [ROOT]
    return [folder for folder in ROOT.iterdir() if (folder / "cgroup.procs").exists()]
