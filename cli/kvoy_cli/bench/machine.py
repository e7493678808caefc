"""What a figure was measured on: the processor, its instruction sets, and the versions of the
parts."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

_TELLING_FLAGS = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "asimd",
    "sve",
)
_PARTS = ("kvoy", "torch", "transformers", "tokenizers", "uvloop", "httptools", "grpcio", "msgspec")


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    architecture: str
    isa: tuple[str, ...]
    """The instruction sets that matter for speed, of those that the processor reports."""
    cores: int
    """That this process may use."""
    memory_bytes: int
    system: str
    python: str
    versions: dict[str, str]

    def lines(self) -> list[str]:
        isa = " ".join(self.isa) or "no vector extensions reported"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [
            f"{self.cpu} ({self.architecture}: {isa}), {self.cores} cores, "
            f"{self.memory_bytes / 2**30:.0f} GiB, {self.system}",
            f"Python {self.python}, {versions}",
        ]


def read_machine() -> Machine:
    name, flags = _read_cpuinfo()
    return Machine(
        cpu=name or platform.processor() or "unknown processor",
        architecture=platform.machine(),
        isa=tuple(flag for flag in _TELLING_FLAGS if flag in flags),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions={name: version for name in _PARTS if (version := _version(name))},
    )


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_cpuinfo() -> tuple[str, frozenset[str]]:
    """(model name, flags) of the first processor; empty where the system has no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "", frozenset()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name", ""), frozenset(flags.split())


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
