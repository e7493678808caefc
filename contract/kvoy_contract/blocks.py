"""Chained hashes of token blocks: the one name by which engine and router know a piece of KV cache.

A block is `block_size` consecutive tokens. The hash of a block covers its tokens and the hash of
the block before it, so it stands for the whole prefix that ends there. The first block's parent is
a seed that covers everything besides tokens that changes a KV value or that must keep tenants
apart: the model's resolved identity, the adapter, and the cache salt. Only full blocks have a hash.

    seed = BLAKE2b-128(person "kvoy-kv-seed-v1",  for each field: u32 length ‖ UTF-8 bytes)
    h_0  = BLAKE2b-128(person "kvoy-kv-blk-v1",  seed    ‖ tokens 0 .. B-1)
    h_i  = BLAKE2b-128(person "kvoy-kv-blk-v1",  h_{i-1} ‖ tokens iB .. iB+B-1)

Tokens are little-endian u32. BLAKE2b is RFC 7693; 128 bits make an accidental or sought collision
infeasible. The golden vectors in `tests/contract/test_blocks.py` pin this format: engines and
routers of neighbouring versions must agree on it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes."""

TokenIds = Sequence[int]

HASH_BYTES = 16
_SEED_PERSON = b"kvoy-kv-seed-v1"
_BLOCK_PERSON = b"kvoy-kv-blk-v1"
_TOKEN_BYTES = 4
_TOKEN_CODE = "I"
assert array(_TOKEN_CODE).itemsize == _TOKEN_BYTES


@lru_cache(maxsize=1024)
def seed_hash(model_identity: str, adapter: str = "", cache_salt: str = "") -> BlockHash:
    """The parent of a first block. Fields are length-prefixed, so no two triples share a seed."""
    hasher = blake2b(digest_size=HASH_BYTES, person=_SEED_PERSON)
    for field in (model_identity, adapter, cache_salt):
        data = field.encode()
        hasher.update(len(data).to_bytes(4, "little"))
        hasher.update(data)
    return BlockHash(hasher.digest())


def pack_tokens(token_ids: TokenIds) -> bytes:
    """Little-endian u32. Raises OverflowError for an id outside 0 .. 2**32-1."""
    packed = array(_TOKEN_CODE, token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes | memoryview) -> array[int]:
    """The inverse of `pack_tokens`. Raises ValueError when the length is not a multiple of 4."""
    token_ids: array[int] = array(_TOKEN_CODE)
    token_ids.frombytes(data)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


def next_hash(parent: BlockHash, token_ids: TokenIds) -> BlockHash:
    """The hash of one full block that follows `parent`."""
    data = parent + pack_tokens(token_ids)
    return BlockHash(blake2b(data, digest_size=HASH_BYTES, person=_BLOCK_PERSON).digest())


def block_hashes(seed: BlockHash, token_ids: TokenIds, block_size: int) -> list[BlockHash]:
    """Hashes of all full blocks of a prompt, in order; a partial block at the end has none."""
    return packed_block_hashes(seed, pack_tokens(token_ids), block_size)


def packed_block_hashes(
    parent: bytes, packed: bytes, block_size: int, first: int = 0
) -> list[BlockHash]:
    """The same of packed tokens, from block `first` on, which follows `parent`."""
    step = block_size * _TOKEN_BYTES
    hashes: list[BlockHash] = []
    for start in range(first * step, len(packed) - step + 1, step):
        data = parent + packed[start : start + step]
        parent = blake2b(data, digest_size=HASH_BYTES, person=_BLOCK_PERSON).digest()
        hashes.append(BlockHash(parent))
    return hashes


def stride_hashes(hashes: Sequence[BlockHash], block_size: int, stride: int) -> list[BlockHash]:
    """Those hashes that an engine reports: of the block that ends each full stride of tokens."""
    blocks_per_stride = stride // block_size
    return list(hashes[blocks_per_stride - 1 :: blocks_per_stride])


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def unpack_hashes(data: bytes) -> list[BlockHash]:
    """Raises ValueError when the length is not a multiple of 16."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are not a whole number of {HASH_BYTES}-byte hashes")
    return [BlockHash(data[i : i + HASH_BYTES]) for i in range(0, len(data), HASH_BYTES)]
