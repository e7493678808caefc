"""Half-precision weight formats: close to what they are made of, and chosen by measurement."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvoy_engine.kernels.build import KernelsUnavailable, load_kernels
from kvoy_engine.linear import Bf16PackedFormat, Fp16PackedFormat, WeightFormat
from kvoy_engine.model_config import load_model_config
from kvoy_engine.model_runner import RunnerOptions, load_runner
from kvoy_engine.native_ops import Fp16NativeFormat
from kvoy_engine.testing import write_tiny_model
from kvoy_engine.weight_format import choose_format


def supported_formats() -> list[WeightFormat]:
    formats: list[WeightFormat] = [Fp16NativeFormat(load_kernels())]
    if Fp16PackedFormat.is_supported():
        formats.append(Fp16PackedFormat())
    if Bf16PackedFormat.is_supported():
        formats.append(Bf16PackedFormat())
    return formats


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 192), (100, 70), (600, 64), (1, 1)])
def test_every_format_multiplies_by_its_rounded_weights(
    num_in: int, num_out: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
    bias = torch.randn(num_out, generator=generator) if has_bias else None
    for each in supported_formats():
        linear = each.linear(weight, bias)
        tolerance = 1e-4 if each.activation_dtype == torch.float32 else 3e-2
        for num_rows in (1, 2, 3, 5, 7, 8, 13, 33, 97, 200):
            x = torch.randn(num_rows, num_in, generator=generator).to(each.activation_dtype)
            expected = torch.nn.functional.linear(
                x.double(),
                weight.to(each.weight_dtype).double(),
                None if bias is None else bias.double(),
            )

            result = linear(x)

            assert result.dtype == each.activation_dtype
            torch.testing.assert_close(
                result.double(), expected, rtol=tolerance, atol=tolerance, msg=each.name
            )


@pytest.mark.slow
def test_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    code = (
        "import sys, pathlib; from kvoy_engine.kernels.build import load_kernels; "
        "load_kernels(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    environment = {**os.environ, "CXX": str(compiler)}

    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]

    assert [process.wait() for process in processes] == [0, 0]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum(" -c " in call for call in calls) == 1


def test_a_rows_product_is_the_same_bits_in_every_batch() -> None:
    weight = torch.randn(200, 700)
    linear = Fp16NativeFormat(load_kernels()).linear(weight, None)
    x = torch.randn(300, 700)
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])

    for num_rows in (2, 5, 8, 13, 64, 100, 300):
        assert torch.equal(linear(x[:num_rows].contiguous()), alone[:num_rows])


def test_auto_is_a_half_precision_format_with_its_measurements(tmp_path: Path) -> None:
    config = load_model_config(write_tiny_model(tmp_path))

    choice = choose_format("auto", config, torch.device("cpu"), load_kernels())

    assert choice.format.weight_dtype in (torch.float16, torch.bfloat16)
    assert choice.format.name in choice.measured_us or not choice.measured_us


def test_without_a_compiler_plain_torch_is_used_and_native_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path)
    monkeypatch.setenv("CXX", "/nonexistent/compiler")

    with pytest.raises(KernelsUnavailable, match="cannot be run"):
        load_kernels(tmp_path / "kernels")
    runner = load_runner(folder, RunnerOptions(num_blocks=8), lambda _: None)
    assert runner.info.details["kernels"].startswith("torch (")
    with pytest.raises(ValueError, match="kernels native"):
        load_runner(folder, RunnerOptions(num_blocks=8, kernels="native"), lambda _: None)
