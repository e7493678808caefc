"""Kernels compiled ahead, one library for each instruction set, for machines without a compiler.

An image is built on one machine and runs on others: it carries a library for every common
instruction set, made by `python -m kvoy_engine.kernels`, and a start takes the best that its
machine has. Without any that fits, `build` compiles for this very machine.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from kvoy_engine.kernels.build import compile_for, load_kernels, open_library, source_digest
from kvoy_engine.linear import cpu_flags

DEFAULT_FOLDER = Path(__file__).with_name("prebuilt")
"""Part of the installed package: a read-only file system does for it."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    name: str
    machine: str
    """As `platform.machine` says it."""
    needs: frozenset[str]
    """Flags of the CPU, as Linux names them."""
    compiler_flags: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """With a digest of the source: a library of another version is never taken."""
        return f"{self.name}-{source_digest(self.compiler_flags)}.so"


@dataclass(frozen=True, slots=True)
class Kernels:
    library: ctypes.CDLL
    variant: str
    """Part of the numerics: each rounds its sums in its own way."""


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
INSTRUCTION_SETS = (
    InstructionSet(
        "avx512-bf16", "x86_64", _V4 | {"avx512_bf16"}, ("-march=x86-64-v4", "-mavx512bf16")
    ),
    InstructionSet("avx512", "x86_64", _V4, ("-march=x86-64-v4",)),
    InstructionSet("avx2", "x86_64", _V3, ("-march=x86-64-v3",)),
    InstructionSet(
        "armv8.2-fp16",
        "aarch64",
        frozenset({"asimd", "asimdhp", "fphp"}),
        ("-march=armv8.2-a+fp16",),
    ),
    InstructionSet("armv8", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""Of each kind of machine the best first."""


def find(folder: Path, flags: Collection[str], machine: str) -> tuple[InstructionSet, Path] | None:
    """The best library of the folder that a machine with these flags can run."""
    for each in INSTRUCTION_SETS:
        path = folder / each.file_name
        if each.machine == machine and each.needs <= frozenset(flags) and path.is_file():
            return each, path
    return None


def build_all(folder: Path, machine: str, progress: Callable[[str], None]) -> list[Path]:
    """Compile for every instruction set of this kind of machine. Raises KernelsUnavailable."""
    paths = []
    for each in INSTRUCTION_SETS:
        if each.machine == machine:
            progress(f"compiling for {each.name}")
            compile_for(each.compiler_flags, folder / each.file_name)
            paths.append(folder / each.file_name)
    return paths


def load(folder: Path = DEFAULT_FOLDER) -> Kernels:
    """What was compiled ahead, else compiled now for this machine. Raises KernelsUnavailable."""
    found = find(folder, cpu_flags(), platform.machine())
    if found is None:
        return Kernels(load_kernels(), "native")
    instruction_set, path = found
    return Kernels(open_library(path), instruction_set.name)
