"""What a decoder asks of its backend between the linear layers, and the plain-torch backend.

Two backends give equal results: `TorchOps` here, on any device and in any dtype, and `NativeOps`,
which runs compiled kernels on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kvoy_engine.attention import PagedAttention, StepIndex
from kvoy_engine.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What distinguishes one layer's attention from another's."""

    index: int
    window: int | None
    q_norm: torch.Tensor | None
    """(head_dim,) RMS norm weights of every query head, before the rotation; likewise for keys."""
    k_norm: torch.Tensor | None


class Ops(Protocol):
    """Everything between two linear layers. T tokens, in the flat order of the step's rows."""

    def begin(self, inputs: StepInputs) -> None:
        """The following calls belong to this step."""
        ...

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add `delta` to `residual` in place and return its RMS norm, in the activation dtype."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(T, 2 * intermediate) to (T, intermediate): silu(first half) * second half."""
        ...

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """(T, q_size + 2 * kv_size) to (T, q_size); writes the step's keys and values to the
        cache."""
        ...


class TorchOps:
    """The plain-torch backend."""

    def __init__(
        self, attention: PagedAttention, eps: float, activation_dtype: torch.dtype
    ) -> None:
        self._attention = attention
        self._eps = eps
        self._activation_dtype = activation_dtype
        self._step: StepIndex | None = None

    def begin(self, inputs: StepInputs) -> None:
        self._step = self._attention.index(inputs)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        if delta is not None:
            residual += delta
        normed = F.rms_norm(residual, (residual.shape[-1],), weight, self._eps)
        return normed.to(self._activation_dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        assert self._step is not None
        return self._attention.run(
            qkv, self._step, layer.index, layer.window, layer.q_norm, layer.k_norm, self._eps
        )
