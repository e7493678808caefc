"""The paged key/value memory: one tensor in which one block is one contiguous range of bytes.

Layout `kv[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, so a block can be sent
to another engine as it lies. Which block holds what is the block pool's knowledge, not this
module's.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch

from kvoy_engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape and dtype of one block."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: torch.dtype) -> KvShape:
        return cls(config.num_layers, config.num_kv_heads, block_size, config.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size


class KvCache:
    """`num_blocks` blocks. On the CPU memory is taken from the system as blocks are first written.

    Raises ValueError when the system refuses.
    """

    def __init__(self, shape: KvShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.tensor = _zeros(
            (
                num_blocks,
                shape.num_layers,
                2,
                shape.num_kv_heads,
                shape.block_size,
                shape.head_dim,
            ),
            shape.dtype,
            device,
        )

    def keys(self, layer: int) -> torch.Tensor:
        """(num_blocks, num_kv_heads, block_size, head_dim) view."""
        return self.tensor[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """(num_blocks, num_kv_heads, block_size, head_dim) view."""
        return self.tensor[:, layer, 1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU pages that the system only gives when they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write, and so take, every page at once.
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise ValueError(f"the system does not give {num_bytes} bytes for KV blocks") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
