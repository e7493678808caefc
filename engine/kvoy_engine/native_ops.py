"""The compiled kernels behind the `Ops` interface, on the CPU in float32 and half precision.

Structures are filled once per model, layer and step, so that a call passes a few pointers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any, Protocol

import torch

from kvoy_engine.kv_cache import KvCache
from kvoy_engine.linear import Linear, check_fp16_range
from kvoy_engine.model_config import ModelConfig
from kvoy_engine.ops import AttentionLayer
from kvoy_engine.step_inputs import StepInputs

_TYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)
KV_DTYPES = tuple(_TYPE_CODES)
_PANEL = 64
"""Outputs in a panel; `PANEL` in the source of the kernels."""


class _Kernel(Protocol):
    """A C function of the library."""

    argtypes: Any
    restype: Any

    def __call__(self, *arguments: int | float | None) -> None: ...


class _Fp16Linear:
    __slots__ = ("_bias", "_function", "_in_features", "_panels", "out_features", "weight_bytes")

    def __init__(self, function: _Kernel, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._function = function
        self.out_features, self._in_features = weight.shape
        padding = -self.out_features % _PANEL
        padded = torch.nn.functional.pad(weight, (0, 0, 0, padding))
        self._panels = padded.view(-1, _PANEL, self._in_features).transpose(1, 2).contiguous()
        self._bias = bias
        self.weight_bytes = self._panels.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        out = x.new_empty((rows, self.out_features))
        self._function(
            x.data_ptr(),
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            rows,
            self._in_features,
            self.out_features,
            torch.get_num_threads(),
        )
        return out


class Fp16NativeFormat:
    """float16 weights in our own panels, float32 activations and sums.

    A row's result is the same bits whatever else is in the batch.
    """

    name = "fp16 native"
    weight_dtype = torch.float16
    activation_dtype = torch.float32

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._function = _function(kernels.kvoy_linear_fp16, [c_void_p] * 4 + [c_int64] * 4)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Raises OverflowError when a weight has no float16 value."""
        check_fp16_range(weight)
        return _Fp16Linear(
            self._function,
            weight.to(torch.float16),
            None if bias is None else bias.to(torch.float32).contiguous(),
        )


class _Model(ctypes.Structure):
    _fields_ = (
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("activation_type", c_int64),
        ("kv_type", c_int64),
        ("kv", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("scale", c_float),
        ("eps", c_float),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("key_offset", c_int64),
        ("value_offset", c_int64),
        ("window", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("num_threads", c_int64),
        ("positions", c_void_p),
        ("starts", c_void_p),
        ("query_offsets", c_void_p),
        ("table", c_void_p),
        ("table_offsets", c_void_p),
    )


class NativeOps:
    """Residual float32; activations float32 or bfloat16; cache float32, float16 or bfloat16."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        config: ModelConfig,
        cache: KvCache,
        cos: torch.Tensor,
        sin: torch.Tensor,
        activation_dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        """`cos` and `sin` are (positions, head_dim / 2), float32, contiguous."""
        assert activation_dtype in ACTIVATION_DTYPES
        assert cos.dtype == sin.dtype == torch.float32
        self._activation_dtype = activation_dtype
        self._activation_code = _TYPE_CODES[activation_dtype]
        self._num_threads = num_threads
        self._eps = config.rms_norm_eps
        self._q_size = config.q_size
        self._kept = (cache, cos, sin)  # alive as long as the pointers below
        self._layers: dict[int, tuple[_Layer, int]] = {}
        strides = cache.tensor.stride()
        self._layer_stride, self._part_stride = strides[1], strides[2]
        self._model = _Model(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=cache.shape.block_size,
            block_stride=strides[0],
            activation_type=self._activation_code,
            kv_type=_TYPE_CODES[cache.shape.dtype],
            kv=cache.tensor.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            scale=config.head_dim**-0.5,
            eps=config.rms_norm_eps,
        )
        self._model_pointer = ctypes.addressof(self._model)
        self._inputs: StepInputs | None = None
        self._step = _Step(num_threads=num_threads)
        self._step_pointer = ctypes.addressof(self._step)
        self._add_rms_norm = _function(
            kernels.kvoy_add_rms_norm, [c_void_p] * 4 + [c_int64] * 2 + [c_float] + [c_int64] * 2
        )
        self._silu_mul = _function(kernels.kvoy_silu_mul, [c_void_p] * 2 + [c_int64] * 4)
        self._attention = _function(kernels.kvoy_attention, [c_void_p] * 5)
        self._greedy = _function(
            kernels.kvoy_greedy, [c_void_p] + [c_int64] * 2 + [c_void_p] * 2 + [c_int64]
        )

    def begin(self, inputs: StepInputs) -> None:
        self._inputs = inputs  # alive as long as the pointers below
        step = self._step
        step.num_tokens = inputs.num_tokens
        step.num_rows = inputs.num_rows
        step.positions = inputs.positions.ctypes.data
        step.starts = inputs.starts.ctypes.data
        step.query_offsets = inputs.query_offsets.ctypes.data
        step.table = inputs.table.ctypes.data
        step.table_offsets = inputs.table_offsets.ctypes.data

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(residual, dtype=self._activation_dtype)
        rows, width = residual.shape
        self._add_rms_norm(
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            self._eps,
            self._activation_code,
            self._num_threads,
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        self._silu_mul(
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            self._activation_code,
            self._num_threads,
        )
        return out

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        out = qkv.new_empty((qkv.shape[0], self._q_size))
        self._attention(
            self._model_pointer,
            self._layer_pointer(layer),
            self._step_pointer,
            qkv.data_ptr(),
            out.data_ptr(),
        )
        return out

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Satisfies `sampler.Greedy` for float32 logits."""
        rows, width = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        finite = torch.empty(rows, dtype=torch.bool)
        self._greedy(
            logits.data_ptr(), rows, width, ids.data_ptr(), finite.data_ptr(), self._num_threads
        )
        return ids, finite

    def _layer_pointer(self, layer: AttentionLayer) -> int:
        known = self._layers.get(layer.index)
        if known is None:
            keys = layer.index * self._layer_stride
            structure = _Layer(
                key_offset=keys,
                value_offset=keys + self._part_stride,
                window=layer.window or 0,
                q_norm=None if layer.q_norm is None else layer.q_norm.data_ptr(),
                k_norm=None if layer.k_norm is None else layer.k_norm.data_ptr(),
            )
            known = self._layers[layer.index] = (structure, ctypes.addressof(structure))
        return known[1]


def _function(function: _Kernel, argtypes: Sequence[type]) -> _Kernel:
    function.argtypes = argtypes
    function.restype = None
    return function
