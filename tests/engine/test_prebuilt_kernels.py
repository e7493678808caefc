"""Kernels compiled ahead: which library a machine takes, and that each computes what it should."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvoy_engine.kernels.build import open_library
from kvoy_engine.kernels.prebuilt import INSTRUCTION_SETS, find
from kvoy_engine.linear import cpu_flags
from kvoy_engine.native_ops import Fp16NativeFormat

AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for each in INSTRUCTION_SETS:
        (tmp_path / each.file_name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", AVX512 | {"avx512_bf16"}, "avx512-bf16"),
        ("x86_64", AVX512, "avx512"),
        ("x86_64", AVX512 - {"avx512vl"}, "avx2"),
        ("x86_64", AVX2, "avx2"),
        ("x86_64", AVX2 - {"fma"}, None),
        ("x86_64", set(), None),
        ("aarch64", {"asimd", "asimdhp", "fphp"}, "armv8.2-fp16"),
        ("aarch64", {"asimd"}, "armv8"),
        ("riscv64", AVX2, None),
    ],
)
def test_a_machine_takes_the_best_that_it_can_run(
    folder: Path, machine: str, flags: set[str], expected: str | None
) -> None:
    found = find(folder, flags, machine)

    assert (found[0].name if found else None) == expected


def test_a_library_of_another_source_is_not_taken(folder: Path) -> None:
    for path in folder.iterdir():
        path.rename(path.with_name(path.name.replace("-", "-0", 1)))

    assert find(folder, AVX2, "x86_64") is None


@pytest.mark.slow
def test_what_is_compiled_ahead_runs_without_a_compiler_and_multiplies_right(
    tmp_path: Path,
) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "kvoy_engine.kernels", "--to", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    own = [each for each in INSTRUCTION_SETS if each.machine == platform.machine()]
    runnable = [each for each in own if each.needs <= cpu_flags()]

    assert built.returncode == 0, built.stderr
    assert {path.name for path in tmp_path.iterdir()} == {each.file_name for each in own}
    assert runnable
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(70, 100, generator=generator), torch.randn(9, 100, generator=generator)
    expected = torch.nn.functional.linear(x.double(), weight.half().double())
    for each in runnable:
        kernels = open_library(tmp_path / each.file_name)
        result = Fp16NativeFormat(kernels).linear(weight, None)(x)
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4, msg=each.name)


def test_without_a_compiler_the_command_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvoy_engine.kernels", "--to", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"CXX": str(tmp_path / "none")},
    )

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"{tmp_path}/none cannot be run" in line
    assert list(tmp_path.iterdir()) == []
