"""Which weight format this machine should use, by name or by a short measurement at start."""

from __future__ import annotations

import ctypes
import math
import time
from dataclasses import dataclass, field

import torch

from kvoy_engine.linear import Bf16PackedFormat, Fp16PackedFormat, Linear, PlainFormat, WeightFormat
from kvoy_engine.model_config import ModelConfig
from kvoy_engine.native_ops import Fp16NativeFormat

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_MEASURED_ROWS = (1, 8, 512)
"""One user, a small batch, a prompt."""
_MAX_MEASURED_WEIGHTS = 4 << 20
"""Larger layers are measured by a part of them, so that the choice takes well under a second."""

_CLEARLY = 1.15


@dataclass(frozen=True, slots=True)
class FormatChoice:
    format: WeightFormat
    measured_us: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Format name to microseconds at 1, 8 and 512 rows; empty when there was nothing to choose."""

    def explain(self) -> dict[str, str]:
        rows = "/".join(map(str, _MEASURED_ROWS))
        return {
            f"us at {rows} rows, {name}": " / ".join(f"{value:.0f}" for value in times)
            for name, times in self.measured_us.items()
        }


def choose_format(
    dtype: str, config: ModelConfig, device: torch.device, kernels: ctypes.CDLL | None
) -> FormatChoice:
    """The format for `dtype`, or for "auto" the best half-precision format of this machine.

    On CUDA "auto" keeps a half-precision checkpoint's own dtype. On a CPU the packed formats that
    it supports are measured; "auto" is float32 where there is none. `kernels` are the compiled
    kernels, if they can be had. Raises ValueError for an unknown dtype.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if device.type != "cpu":
        own = config.dtype if config.dtype in ("float16", "bfloat16") else "bfloat16"
        return FormatChoice(PlainFormat(DTYPES[own if dtype == "auto" else dtype], device))
    candidates = [
        each
        for each in _packed_formats(kernels)
        if dtype == "auto" or each.weight_dtype == DTYPES[dtype]
    ]
    plain = PlainFormat(DTYPES["float32" if dtype == "auto" else dtype], device)
    return _fastest(candidates, config) if candidates else FormatChoice(plain)


def _packed_formats(kernels: ctypes.CDLL | None) -> list[WeightFormat]:
    """What this CPU supports, the most exact first."""
    formats: list[WeightFormat] = []
    if kernels is not None:
        formats.append(Fp16NativeFormat(kernels))
    if Fp16PackedFormat.is_supported():
        formats.append(Fp16PackedFormat())
    if Bf16PackedFormat.is_supported():
        formats.append(Bf16PackedFormat())
    return formats


def _fastest(formats: list[WeightFormat], config: ModelConfig) -> FormatChoice:
    if len(formats) == 1:
        return FormatChoice(formats[0])
    measured = _measure_us(formats, config)
    # The geometric mean: a format twice as fast at any of the sizes counts the same.
    scores = [math.prod(measured[each.name]) ** (1 / len(_MEASURED_ROWS)) for each in formats]
    # Formats come most exact first: the next must be clearly faster, more than a measurement's
    # noise.
    best = 0
    for index in range(1, len(formats)):
        if scores[index] * _CLEARLY < scores[best]:
            best = index
    return FormatChoice(formats[best], measured)


def _measure_us(formats: list[WeightFormat], config: ModelConfig) -> dict[str, tuple[float, ...]]:
    """Format name to the best of a few runs per number of rows, on a layer of the model's own
    width.

    Formats take turns, so that a busy moment of the machine hits all of them.
    """
    width = config.hidden_size
    out = min(2 * config.intermediate_size, max(256, _MAX_MEASURED_WEIGHTS // width))
    linears = {each.name: each.linear(torch.full((out, width), 0.01), None) for each in formats}
    times: dict[str, list[float]] = {each.name: [] for each in formats}
    for num_rows in _MEASURED_ROWS:
        best = dict.fromkeys(times, math.inf)
        for _ in range(5 if num_rows > 64 else 20):
            for each in formats:
                x = torch.ones(num_rows, width, dtype=each.activation_dtype)
                best[each.name] = min(best[each.name], _timed_us(linears[each.name], x))
        for name, value in best.items():
            times[name].append(value)
    return {name: tuple(values) for name, values in times.items()}


def _timed_us(linear: Linear, x: torch.Tensor) -> float:
    start = time.perf_counter()
    linear(x)
    return (time.perf_counter() - start) * 1e6
