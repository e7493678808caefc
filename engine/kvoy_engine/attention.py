"""Attention over the paged cache in plain torch: the reference on the CPU, the way on CUDA.

Rows of one token (decodes) are computed together, in groups of similar context so that short ones
do not pay for the longest. Rows of many tokens (prefill chunks) are computed one by one: one dense
mask across rows would grow with the square of the batch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kvoy_engine.kv_cache import KvCache
from kvoy_engine.model_config import ModelConfig
from kvoy_engine.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """R rows of one token whose tables have about the same length of N blocks."""

    tokens: torch.Tensor
    """(R,) index of each row's token in the flat step."""
    table: torch.Tensor
    """(R, N) block ids, padded with block 0."""
    positions: torch.Tensor
    """(R,)"""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One row of many tokens."""

    begin: int
    end: int
    start: int
    table: torch.Tensor
    """(N,) block ids"""


@dataclass(frozen=True, slots=True)
class StepIndex:
    """A step's indices on the device, shared by all layers."""

    positions: torch.Tensor
    """(T,) int64"""
    slot_blocks: torch.Tensor
    """(T,) block that takes each token's key and value."""
    slot_offsets: torch.Tensor
    """(T,) and where in it."""
    decodes: list[_DecodeGroup]
    chunks: list[_Chunk]


class PagedAttention:
    """Rotates, writes keys and values to the cache, and attends to what the block tables name."""

    def __init__(
        self, config: ModelConfig, cache: KvCache, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """`cos` and `sin` are (max_model_len, head_dim / 2)."""
        self._config = config
        self._cache = cache
        self._cos, self._sin = cos, sin
        self._device = cache.tensor.device

    def index(self, inputs: StepInputs) -> StepIndex:
        block_size = self._cache.shape.block_size
        counts = np.diff(inputs.query_offsets)
        row_of = np.repeat(np.arange(inputs.num_rows), counts)
        entries = inputs.table_offsets[:-1][row_of] + inputs.positions // block_size
        return StepIndex(
            positions=self._long(inputs.positions),
            slot_blocks=self._long(inputs.table[entries]),
            slot_offsets=self._long(inputs.positions % block_size),
            decodes=self._decode_groups(inputs, np.flatnonzero(counts == 1)),
            chunks=[
                _Chunk(
                    begin=int(inputs.query_offsets[row]),
                    end=int(inputs.query_offsets[row + 1]),
                    start=int(inputs.starts[row]),
                    table=self._long(inputs.row_table(row)),
                )
                for row in np.flatnonzero(counts > 1).tolist()
            ],
        )

    def run(
        self,
        qkv: torch.Tensor,
        step: StepIndex,
        layer: int,
        window: int | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """(T, q_size + 2 * kv_size) to (T, q_size)."""
        config = self._config
        q, k, v = torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=-1)
        num_tokens = len(qkv)
        q = q.view(num_tokens, config.num_heads, config.head_dim)
        k = k.view(num_tokens, config.num_kv_heads, config.head_dim)
        v = v.view(num_tokens, config.num_kv_heads, config.head_dim)
        if q_norm is not None and k_norm is not None:
            q, k = _rms_norm(q, q_norm, eps), _rms_norm(k, k_norm, eps)
        cos = self._cos[step.positions].unsqueeze(1)  # (T, 1, head_dim / 2)
        sin = self._sin[step.positions].unsqueeze(1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)

        keys, values = self._cache.keys(layer), self._cache.values(layer)
        keys[step.slot_blocks, :, step.slot_offsets] = k.to(keys.dtype)
        values[step.slot_blocks, :, step.slot_offsets] = v.to(values.dtype)

        out = torch.empty_like(q)
        for group in step.decodes:
            out[group.tokens] = self._decode(q[group.tokens], group, keys, values, window)
        for chunk in step.chunks:
            out[chunk.begin : chunk.end] = self._prefill(
                q[chunk.begin : chunk.end], chunk, keys, values, window
            )
        return out.flatten(1)

    def _decode(
        self,
        q: torch.Tensor,
        group: _DecodeGroup,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """(R, num_heads, head_dim) queries, one a row."""
        num_rows = len(group.tokens)
        shape = (num_rows, self._config.num_kv_heads, -1, self._config.head_dim)
        k = keys[group.table].transpose(1, 2).reshape(shape).to(q.dtype)
        v = values[group.table].transpose(1, 2).reshape(shape).to(q.dtype)
        columns = torch.arange(k.shape[2], device=self._device)
        visible = columns <= group.positions.unsqueeze(1)  # (R, context)
        if window is not None:
            visible &= columns > group.positions.unsqueeze(1) - window
        # What another sequence left behind may be anything, and no weight is small enough for NaN.
        hidden = ~visible[:, None, :, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        # The query heads of one key head become rows of one product: keys are not repeated.
        q = q.view(num_rows, self._config.num_kv_heads, -1, self._config.head_dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None, :])
        return out.flatten(1, 2)

    def _prefill(
        self,
        q: torch.Tensor,
        chunk: _Chunk,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """(n, num_heads, head_dim) queries of one row."""
        num_tokens = chunk.end - chunk.begin
        context = chunk.start + num_tokens
        k = keys[chunk.table].transpose(0, 1).flatten(1, 2)[:, :context].to(q.dtype)
        v = values[chunk.table].transpose(0, 1).flatten(1, 2)[:, :context].to(q.dtype)
        mask = None
        if chunk.start > 0 or window is not None:
            columns = torch.arange(context, device=self._device)
            rows = torch.arange(chunk.start, context, device=self._device).unsqueeze(1)
            mask = columns <= rows
            if window is not None:
                mask &= columns > rows - window
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self._config.group_size > 1,
        )
        return out.squeeze(0).transpose(0, 1)

    def _decode_groups(
        self, inputs: StepInputs, rows: np.ndarray[tuple[int], np.dtype[np.intp]]
    ) -> list[_DecodeGroup]:
        by_size: dict[int, list[int]] = defaultdict(list)
        for row in rows.tolist():
            num_blocks = int(inputs.table_offsets[row + 1] - inputs.table_offsets[row])
            by_size[(num_blocks - 1).bit_length()].append(row)
        groups = []
        for members in by_size.values():
            tables = [inputs.row_table(row) for row in members]
            table = np.zeros((len(members), max(map(len, tables))), dtype=np.int64)
            for padded, entries in zip(table, tables, strict=True):
                padded[: len(entries)] = entries
            groups.append(
                _DecodeGroup(
                    tokens=self._long(inputs.query_offsets[members]),
                    table=self._long(table),
                    positions=self._long(inputs.starts[members]),
                )
            )
        return groups

    def _long(self, array: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim / 2), as every checkpoint of these families is stored."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
