"""The random number of one sampled token: a function of (seed, choice, position) and of nothing
else.

So a sequence that is preempted, batched with others or continued on another engine draws the same
numbers.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

_PACK = struct.Struct("<QII").pack
_TO_UNIT = 2.0**-53


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1): BLAKE2b-64 of seed (u64), choice (u32) and position (u32), little-endian.

    Its 53 highest bits are kept, all that a float64 below 1 can hold.
    """
    digest = blake2b(_PACK(seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * _TO_UNIT
