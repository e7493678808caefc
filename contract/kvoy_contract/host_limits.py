"""What this process may use of its machine: cores and memory, within its container's limits.

Reads Linux's own files: affinity, /proc/meminfo, and the control groups of the process, version 1
and 2, in a container or outside, up to the outermost one: every level may hold a limit. Elsewhere
the machine's own numbers count. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_UNLIMITED_BYTES = 1 << 60
"""Version 1 says "no limit" as a number near 2**63."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """In bytes."""

    total: int
    """Of the machine, or the container's limit when that is less."""
    available: int
    """What may still be taken: page cache that can be dropped counts as free."""


def num_usable_cores(root: Path = _ROOT) -> int:
    """Cores that this process may keep busy, at least 1.

    A quota of two and a half cores makes two: threads beyond a quota are all stopped together, in
    the middle of a step.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cpu_quota(group)) is not None]
    return max(1, int(min([cores, *quotas])))


def host_memory(root: Path = _ROOT) -> HostMemory:
    """The machine's memory, or what the tightest of the process' control groups leaves of it."""
    total, available = _machine_memory(root)
    for group in _groups(root, "memory"):
        limit, used = _memory_limit(group), _memory_used(group)
        if limit is not None:
            total = min(total, limit)
            available = min(available, max(0, limit - used))
    return HostMemory(total, available)


def container_memory_limit(root: Path = _ROOT) -> int | None:
    """Bytes that the tightest of the process' control groups lets it have; None without a limit."""
    limits = [limit for group in _groups(root, "memory") if (limit := _memory_limit(group))]
    return min(limits, default=None)


def _machine_memory(root: Path) -> tuple[int, int]:
    """(total, available) as the kernel sees the whole machine."""
    fields = _numbers(root / "proc/meminfo")
    if "MemTotal:" in fields and "MemAvailable:" in fields:
        return fields["MemTotal:"] * 1024, fields["MemAvailable:"] * 1024
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total // 2


def _cpu_quota(group: Path) -> float | None:
    """In cores; None without a quota."""
    text = _text(group / "cpu.max").split()  # version 2: "QUOTA PERIOD" or "max PERIOD"
    if not text:
        text = [_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        quota, period = int(text[0]), int(text[1])
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None  # version 1: -1 is none


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _text(group / name)
        if text.isdigit():
            limit = int(text)
            return limit if limit < _UNLIMITED_BYTES else None
    return None


def _memory_used(group: Path) -> int:
    """What counts against the limit and does not go away by itself, as a kubelet reckons."""
    stat = _numbers(group / "memory.stat")
    for name, cache in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        text = _text(group / name)
        if text.isdigit():
            return max(0, int(text) - stat.get(cache, 0))
    return 0


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process' control groups that may limit `controller`, innermost first."""
    paths = _own_paths(root)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        # ID PARENT MAJOR:MINOR ROOT MOUNTPOINT OPTIONS [TAGS...] - TYPE SOURCE SUPER-OPTIONS
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        if kind == "cgroup2":
            path = paths.get("")
        elif kind == "cgroup" and controller in options.split()[-1].split(","):
            path = paths.get(controller)
        else:
            continue
        if path is not None:
            fields = left.split()
            yield from _levels(root / fields[4].lstrip("/"), fields[3], path)


def _own_paths(root: Path) -> dict[str, str]:
    """Controller of version 1, or "" for version 2, to the path of this process' group."""
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _levels(mount: Path, mount_root: str, path: str) -> Iterator[Path]:
    """From the group up to the mount. A container often sees its own group as the whole mount,
    while the path still is the machine's."""
    try:
        inner = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        inner = PurePosixPath()
    folder = mount / inner
    if not folder.is_dir():
        inner, folder = PurePosixPath(), mount
    for _ in range(len(inner.parts) + 1):
        yield folder
        folder = folder.parent


def _numbers(path: Path) -> dict[str, int]:
    """Lines `NAME NUMBER ...` of a file."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(path: Path) -> str:
    """Empty for a file that is not there."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
