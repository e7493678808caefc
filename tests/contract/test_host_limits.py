"""What a container leaves to a process: fake trees of control groups, versions 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoy_contract.host_limits import (
    HostMemory,
    container_memory_limit,
    host_memory,
    num_usable_cores,
)

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"


class FakeMachine:
    """A root folder with /proc and /sys files of a machine with 64 GiB, 48 of them available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text + "\n")

    def mount(self, mounts: str, cgroup: str) -> None:
        self.write("proc/self/mountinfo", "22 1 254:1 / / rw - ext4 /dev/vda rw\n" + mounts)
        self.write("proc/self/cgroup", cgroup)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return FakeMachine(tmp_path)


def in_a_v2_container(machine: FakeMachine) -> str:
    """A namespace of its own: the container's group is the whole mount."""
    machine.mount("30 22 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw,nsdelegate", "0::/")
    return "sys/fs/cgroup"


def in_a_v1_container(machine: FakeMachine) -> tuple[str, str]:
    """Without such a namespace: the path is the machine's, and only its last part is mounted."""
    pod = "/kubepods/burstable/pod1/c1"
    machine.mount(
        f"31 22 0:30 {pod} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 22 0:31 {pod} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        f"33 22 0:32 {pod} /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset",
        f"3:cpu,cpuacct:{pod}\n2:memory:{pod}\n1:cpuset:{pod}",
    )
    return "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/memory"


def test_without_control_groups_the_machine_counts(machine: FakeMachine) -> None:
    assert host_memory(machine.root) == HostMemory(64 * GIB, 48 * GIB)
    assert num_usable_cores(machine.root) == 8


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_a_v2_quota_bounds_the_threads(machine: FakeMachine, quota: str, cores: int) -> None:
    machine.write(f"{in_a_v2_container(machine)}/cpu.max", quota)

    assert num_usable_cores(machine.root) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("350000", 3), ("20000", 1)])
def test_a_v1_quota_bounds_the_threads(machine: FakeMachine, quota: str, cores: int) -> None:
    cpu, _ = in_a_v1_container(machine)
    machine.write(f"{cpu}/cpu.cfs_quota_us", quota)
    machine.write(f"{cpu}/cpu.cfs_period_us", "100000")

    assert num_usable_cores(machine.root) == cores


def test_a_v2_limit_bounds_the_memory_and_page_cache_is_free(machine: FakeMachine) -> None:
    group = in_a_v2_container(machine)
    machine.write(f"{group}/memory.max", str(8 * GIB))
    machine.write(f"{group}/memory.current", str(5 * GIB))
    machine.write(f"{group}/memory.stat", f"anon {2 * GIB}\ninactive_file {3 * GIB}")

    assert host_memory(machine.root) == HostMemory(8 * GIB, 6 * GIB)
    assert container_memory_limit(machine.root) == 8 * GIB


def test_a_v1_limit_bounds_the_memory_and_page_cache_is_free(machine: FakeMachine) -> None:
    _, group = in_a_v1_container(machine)
    machine.write(f"{group}/memory.limit_in_bytes", str(8 * GIB))
    machine.write(f"{group}/memory.usage_in_bytes", str(5 * GIB))
    machine.write(f"{group}/memory.stat", f"inactive_file 1\ntotal_inactive_file {3 * GIB}")

    assert host_memory(machine.root) == HostMemory(8 * GIB, 6 * GIB)


def test_no_limit_is_no_limit(machine: FakeMachine) -> None:
    _, group = in_a_v1_container(machine)
    machine.write(f"{group}/memory.limit_in_bytes", NO_LIMIT_V1)
    machine.write(f"{group}/memory.usage_in_bytes", str(5 * GIB))

    assert host_memory(machine.root) == HostMemory(64 * GIB, 48 * GIB)
    assert container_memory_limit(machine.root) is None


def test_a_group_above_its_limit_leaves_nothing(machine: FakeMachine) -> None:
    group = in_a_v2_container(machine)
    machine.write(f"{group}/memory.max", str(1 * GIB))
    machine.write(f"{group}/memory.current", str(2 * GIB))

    assert host_memory(machine.root).available == 0


def test_outside_a_container_the_tightest_level_counts(machine: FakeMachine) -> None:
    machine.mount(
        "30 22 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup rw", "0::/user.slice/one"
    )
    machine.write("sys/fs/cgroup/user.slice/memory.max", str(4 * GIB))
    machine.write("sys/fs/cgroup/user.slice/memory.current", str(1 * GIB))
    machine.write("sys/fs/cgroup/user.slice/one/memory.max", "max")
    machine.write("sys/fs/cgroup/user.slice/one/memory.current", "0")
    machine.write("sys/fs/cgroup/user.slice/one/cpu.max", "max 100000")
    machine.write("sys/fs/cgroup/user.slice/cpu.max", "200000 100000")

    assert host_memory(machine.root) == HostMemory(4 * GIB, 3 * GIB)
    assert num_usable_cores(machine.root) == 2


def test_of_a_hybrid_machine_the_version_with_the_controller_counts(machine: FakeMachine) -> None:
    machine.mount(
        "32 22 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 22 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        "4:memory:/\n0::/",
    )
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GIB))
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", str(1 * GIB))
    machine.write("sys/fs/cgroup/unified/cgroup.procs", "1")

    assert host_memory(machine.root) == HostMemory(2 * GIB, 1 * GIB)


def test_this_machine_has_cores_and_memory() -> None:
    memory = host_memory()

    assert 0 < memory.available <= memory.total
    assert num_usable_cores() >= 1
