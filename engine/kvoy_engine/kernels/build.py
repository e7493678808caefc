"""Compiles `kernels.cpp`: for this very machine at first use, or for a named instruction set.

What is compiled at first use is kept in a cache folder. Its file name holds a digest of the source,
the compiler and the CPU, so a change of any of them compiles anew. Of processes that start at once
one compiles, under a lock, and the others wait.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from kvoy_engine.home import home
from kvoy_engine.linear import cpu_flags

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-w")
_THIS_MACHINE = ("-march=native",)
_COMPILE_TIMEOUT_S = 300


class KernelsUnavailable(Exception):
    """The kernels cannot be compiled or loaded here; the message says why."""


def load_kernels(cache_dir: Path | None = None) -> ctypes.CDLL:
    """The compiled kernels, compiled now (a few seconds) when the cache does not have them.

    Raises KernelsUnavailable.
    """
    compiler = find_compiler()
    openmp = _openmp_library()
    path = (cache_dir or default_cache_dir()) / f"{_digest(compiler, openmp)}.so"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("w") as lock:
                # The kernel frees it when the process ends, however it ends.
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.is_file():
                    _compile(compiler, openmp, _THIS_MACHINE, path)
        except OSError as error:
            raise KernelsUnavailable(f"the kernels cannot be stored: {error}") from error
    return open_library(path)


def open_library(path: Path) -> ctypes.CDLL:
    """Raises KernelsUnavailable."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error


def find_compiler() -> str:
    """`$CXX`, else g++ or c++. Raises KernelsUnavailable when there is none."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise KernelsUnavailable("there is no C++ compiler (g++)")
    return compiler


def compile_for(machine_flags: Sequence[str], path: Path) -> None:
    """Write the library for the instruction set that the compiler's flags name to `path`.

    Raises KernelsUnavailable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _compile(find_compiler(), _openmp_library(), machine_flags, path)


def source_digest(machine_flags: Sequence[str]) -> str:
    """Of what a library for these flags is made from, whatever compiles it."""
    parts = (_SOURCE.read_text(encoding="utf-8"), *_FLAGS, *machine_flags)
    return blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def default_cache_dir() -> Path:
    """`kernels` in the cache folder that the models are in too."""
    return home() / "kernels"


def _openmp_library() -> Path | None:
    """torch's own OpenMP runtime: a second one in the process would make a second pool of
    threads."""
    folder = Path(torch.__file__).parent / "lib"
    candidates = sorted(folder.glob("libgomp*.so*")) + sorted(
        folder.parent.with_name("torch.libs").glob("libgomp*.so*")
    )
    return candidates[0] if candidates else None


def _digest(compiler: str, openmp: Path | None) -> str:
    version = _run([compiler, "--version"]).stdout
    parts = (
        _SOURCE.read_text(encoding="utf-8"),
        " ".join((*_FLAGS, *_THIS_MACHINE)),
        version,
        platform.machine(),
        " ".join(sorted(cpu_flags())),
        str(openmp),
    )
    return blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _compile(compiler: str, openmp: Path | None, machine_flags: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        object_file, library = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        has_openmp = openmp is not None or sys.platform == "linux"
        compile_flags = [*_FLAGS, *machine_flags, *(["-fopenmp"] if has_openmp else [])]
        _checked([compiler, *compile_flags, "-c", str(_SOURCE), "-o", str(object_file)])
        link_flags = [str(openmp)] if openmp else (["-fopenmp"] if has_openmp else [])
        _checked([compiler, "-shared", str(object_file), "-o", str(library), *link_flags])
        library.replace(path)


def _checked(command: list[str]) -> None:
    result = _run(command)
    if result.returncode != 0:
        raise KernelsUnavailable(f"{command[0]} failed: {result.stderr.strip()[-500:]}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]} cannot be run: {error}") from error
