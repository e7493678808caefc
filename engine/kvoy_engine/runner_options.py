"""How to load and run a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["auto", "float64", "float32", "float16", "bfloat16"]
Kernels = Literal["auto", "torch", "native"]


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Options of the torch runner; the flags of `kvoy serve` have the same names."""

    dtype: Dtype = "auto"
    """Weights. auto: the best half-precision format that this machine is measured to have."""
    kv_cache_dtype: Dtype = "auto"
    """auto: float64 and float32 as the weights, half precision otherwise."""
    device: str = "auto"
    """auto: cuda when present, else cpu."""
    num_threads: int | None = None
    """Threads of the CPU's products and kernels; None: all cores that this process may use."""
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    """None: what `gpu_memory_utilization` leaves."""
    num_blocks: int | None = None
    """Goes before `kv_cache_memory_bytes`."""
    gpu_memory_utilization: float | None = None
    """Share of the memory for weights, activations and blocks together: of a CUDA device's (None:
    0.9); on the CPU of the machine's, or of its container's limit (None: a quarter of the free
    memory, 4 GiB at most, for the blocks)."""
    max_model_len: int | None = None
    """None: the model's own limit, or fewer when the blocks do not hold one such sequence."""
    max_num_batched_tokens: int = 2048
    """The largest step that will come: sizes what is held back for activations on CUDA."""
    kernels: Kernels = "auto"
    """auto: compiled kernels on the CPU when they can be had, plain torch otherwise. native: an
    error when they cannot."""
