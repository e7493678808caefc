"""Linear layers in the weight formats that machines are fast at.

A format takes a weight in any dtype and gives a `Linear`: a callable from (num_tokens, in) to
(num_tokens, out). Pre-packing matters more than the dtype at small batches: an unpacked product
repacks its weight at every call. Which packed format wins differs by instruction set, so
`weight_format` chooses.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """`x @ weight.T + bias`; input and output have the format's activation dtype."""

    out_features: int
    weight_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class WeightFormat(Protocol):
    """How weights are stored and multiplied."""

    @property
    def name(self) -> str: ...

    @property
    def weight_dtype(self) -> torch.dtype: ...

    @property
    def activation_dtype(self) -> torch.dtype:
        """What goes into a linear layer and comes out of it."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear: ...


class _PlainLinear:
    __slots__ = ("_bias", "_weight", "out_features", "weight_bytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.out_features = weight.shape[0]
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """torch's own product: exact in float64 and float32, the way on CUDA, slow in half on most
    CPUs."""

    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        return f"{_short(self.dtype)} plain"

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.dtype

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        weight = weight.to(self.device, self.dtype)
        return _PlainLinear(weight, None if bias is None else bias.to(self.device, self.dtype))


class _Fp16PackedLinear:
    __slots__ = ("_packed", "out_features", "weight_bytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        with warnings.catch_warnings():  # the op warns of values beyond float16; checked below
            warnings.simplefilter("ignore")
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        self.out_features = weight.shape[0]
        self.weight_bytes = weight.numel() * 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y


@dataclass(frozen=True, slots=True)
class Fp16PackedFormat:
    """float16 weights packed for fbgemm, float32 activations and sums: nearly lossless on any AVX2
    CPU."""

    name: str = "fp16 packed (fbgemm)"
    weight_dtype: torch.dtype = torch.float16
    activation_dtype: torch.dtype = torch.float32

    @staticmethod
    def is_supported() -> bool:
        return "fbgemm" in torch.backends.quantized.supported_engines

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Raises OverflowError when a weight has no float16 value."""
        check_fp16_range(weight)
        weight = weight.to(torch.float32)
        return _Fp16PackedLinear(weight, None if bias is None else bias.to(torch.float32))


class _OneDnnLinear:
    __slots__ = ("_bias", "_packed", "out_features", "weight_bytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        self.out_features = weight.shape[0]
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return y


@dataclass(frozen=True, slots=True)
class Bf16PackedFormat:
    """bfloat16 weights reordered for oneDNN, bfloat16 activations, float32 sums inside the
    product."""

    name: str = "bf16 packed (oneDNN)"
    weight_dtype: torch.dtype = torch.bfloat16
    activation_dtype: torch.dtype = torch.bfloat16

    @staticmethod
    def is_supported() -> bool:
        if not torch._C._has_mkldnn:
            return False
        # Without native instructions the product is emulated, several times slower than float32.
        return "avx512_bf16" in cpu_flags() or "amx_bf16" in cpu_flags() or "bf16" in cpu_flags()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        weight = weight.to(torch.bfloat16).contiguous()
        return _OneDnnLinear(weight, None if bias is None else bias.to(torch.bfloat16))


def check_fp16_range(weight: torch.Tensor) -> None:
    """Raises OverflowError when a weight has no float16 value."""
    if weight.dtype != torch.float16:
        low, high = weight.aminmax()
        if max(-low, high) > torch.finfo(torch.float16).max:
            raise OverflowError("a weight is beyond the range of float16")


def cpu_flags() -> frozenset[str]:
    """Instruction set flags of this CPU as Linux names them; empty where that is not known."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
