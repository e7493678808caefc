"""Writes one safetensors file tensor by tensor, so that a conversion never holds a whole model.

The format: u64 little-endian header length, a JSON header padded with spaces to 8 bytes, then the
data. Shapes and types are known before any value is computed, so the header comes first and values
stream.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One tensor to write; `load` computes its values when their turn comes."""

    name: str
    dtype: str
    """`F32`, `F16` or `BF16`."""
    shape: tuple[int, ...]
    load: Callable[[], Array]
    """Any float array of that shape, or uint16 bit patterns for `BF16`."""

    @property
    def num_bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


def write_safetensors(
    path: Path, tensors: Sequence[LazyTensor], on_bytes: Callable[[int], None]
) -> None:
    """Write and fsync `path`; `on_bytes` hears how many data bytes are written so far."""
    written = 0
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            data = encode_values(tensor)
            if data.nbytes != tensor.num_bytes:
                raise ValueError(f"{tensor.name}: {data.nbytes} bytes, not {tensor.num_bytes}")
            file.write(data.data)
            written += data.nbytes
            on_bytes(written)
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Sequence[LazyTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def encode_values(tensor: LazyTensor) -> Array:
    """The tensor's values in its stored type, contiguous and little-endian."""
    values = tensor.load()
    if tensor.dtype == "BF16":
        return np.ascontiguousarray(
            values if values.dtype == np.uint16 else to_bfloat16_bits(values.astype(np.float32))
        )
    return np.ascontiguousarray(values, dtype="<f4" if tensor.dtype == "F32" else "<f2")


def to_bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; the bit patterns. NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
