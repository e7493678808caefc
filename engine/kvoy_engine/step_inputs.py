"""A batch as arrays: what every layer of one forward pass shares.

Rows lie one after another in one flat sequence of tokens. Block tables lie one after another too,
so that no padding is stored and kernels need two numbers per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from kvoy_engine.batch import Batch

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Shapes: T tokens, R rows, B block table entries."""

    token_ids: torch.Tensor
    """(T,) int64 on the model's device."""
    positions: IntArray
    """(T,)"""
    starts: IntArray
    """(R,) position of each row's first token: so many tokens are in the cache before this step."""
    query_offsets: IntArray
    """(R + 1,) row r's tokens are [query_offsets[r], query_offsets[r + 1])."""
    table: IntArray
    """(B,) block ids, rows one after another."""
    table_offsets: IntArray
    """(R + 1,)"""

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    def row_table(self, row: int) -> IntArray:
        return self.table[self.table_offsets[row] : self.table_offsets[row + 1]]


def build_inputs(batch: Batch, block_size: int, device: torch.device) -> StepInputs:
    """The arrays of a batch that has at least one row, each of at least one token."""
    rows = batch.rows
    counts = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
    starts = np.array([row.start for row in rows], dtype=np.int32)
    query_offsets = _offsets(counts)
    # A table may be longer than this step needs.
    sizes = (starts + counts + (block_size - 1)) // block_size
    table_offsets = _offsets(sizes)
    table = np.fromiter(
        chain.from_iterable(
            row.block_table[:size] for row, size in zip(rows, sizes.tolist(), strict=True)
        ),
        dtype=np.int32,
        count=int(table_offsets[-1]),
    )
    num_tokens = int(query_offsets[-1])
    token_ids = np.fromiter(
        chain.from_iterable(row.token_ids for row in rows), dtype=np.int64, count=num_tokens
    )
    positions = np.arange(num_tokens, dtype=np.int32)
    positions += np.repeat(starts - query_offsets[:-1], counts)
    return StepInputs(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=positions,
        starts=starts,
        query_offsets=query_offsets,
        table=table,
        table_offsets=table_offsets,
    )


def _offsets(counts: IntArray) -> IntArray:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets
