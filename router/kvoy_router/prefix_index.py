"""Which engine holds which prefix: stride hash → set of endpoints, in 150 bytes per hash or less.

An endpoint is one bit (its slot), a set of endpoints one integer, and equal sets are one object.
Forgetting an endpoint retires its bit at once, and a sweep takes the bit out of the entries a shard
at a time, so that no call is long. Hashes are cut to 64 bits: an accidental clash among ten million
is a matter of one in a million, and a wrong entry costs a recomputation, never a wrong answer.

Engines keep what they report prefix-closed, so the deepest held hash of a prompt tells what an
engine holds, and bisection finds it for all endpoints in one walk.

The number of entries is bounded. The engines' own eviction normally keeps it far below the bound,
since what they evict they report as removed; when it is reached, a shard drops the entries that
were stored or matched longest ago."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from kvoy_contract.blocks import HASH_BYTES, BlockHash

Hashes = bytes | memoryview | Sequence[BlockHash]
"""Packed (16 bytes each), as they come over the wire, or one by one."""
Groups = Sequence[tuple[int, int]]
"""(leading hashes held, the endpoints that hold so many as bits), the deepest first."""

ENTRY_BYTES = 160
"""What a bound in bytes counts for each hash: more than one takes, for its share of the tables."""
NUM_SHARDS = 64
_SHARD_MASK = NUM_SHARDS - 1
_EVICT_FRACTION = 16
"""A full shard drops one in so many entries at a time."""
_MAX_INTERNED = 1 << 16
NOTHING: Mapping[int, int] = MappingProxyType({})


def keys_of(hashes: Hashes) -> array[int]:
    """The first 64 bits of each hash. Raises ValueError when packed bytes are cut short."""
    packed = hashes if isinstance(hashes, bytes | memoryview) else b"".join(hashes)
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of {HASH_BYTES}-byte hashes")
    words = array("Q")
    words.frombytes(packed)
    if sys.byteorder == "big":
        words.byteswap()
    return words[::2]


class PrefixIndex:
    """Not aware of models: hashes of different models, adapters and salts never meet."""

    def __init__(self, max_entries: int = 16_000_000) -> None:
        if max_entries < NUM_SHARDS:
            raise ValueError(f"max_entries must be at least {NUM_SHARDS}, not {max_entries}")
        self.max_entries = max_entries
        self.num_evicted = 0
        """Entries dropped because the bound was reached."""
        self._max_per_shard = max_entries // NUM_SHARDS
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        self._interned: dict[int, int] = {}
        self._live = 0
        """The bits in use; other bits in an entry belong to endpoints that were forgotten."""
        self._retired = 0
        self._sweeping = 0
        self._sweep_next = 0
        self._held: dict[int, int] = {}
        """Slot → number of entries that it is in."""

    def __len__(self) -> int:
        """Entries, with those that a sweep has yet to drop."""
        return sum(len(shard) for shard in self._shards)

    def num_held(self, slot: int) -> int:
        """Hashes that this endpoint is known to hold."""
        return self._held[slot]

    def add_slot(self) -> int:
        """A free bit for an endpoint that holds nothing yet."""
        taken = self._live | self._retired | self._sweeping
        slot = (~taken & (taken + 1)).bit_length() - 1
        self._live |= 1 << slot
        self._held[slot] = 0
        return slot

    def forget(self, slot: int) -> None:
        """Retire an endpoint's bit: from now on it holds nothing, and `slot` must not be used."""
        bit = 1 << slot
        self._live &= ~bit
        if self._held.pop(slot):
            self._retired |= bit

    def store(self, slot: int, keys: Iterable[int]) -> None:
        """The endpoint holds these now; those that it held before are no news."""
        bit = 1 << slot
        interned = self._interned
        shards = self._shards
        num_new = 0
        for key in keys:
            shard = shards[key & _SHARD_MASK]
            holders = shard.get(key)
            if holders is None:
                if len(shard) >= self._max_per_shard:
                    self._evict_from(shard)
                holders = 0
            elif holders & bit:
                continue
            holders |= bit
            shard[key] = interned.setdefault(holders, holders)
            num_new += 1
        self._held[slot] += num_new
        self._tidy()

    def remove(self, slot: int, keys: Iterable[int]) -> None:
        """The endpoint no longer holds these; those that it did not hold are no news."""
        bit = 1 << slot
        interned = self._interned
        shards = self._shards
        num_gone = 0
        for key in keys:
            shard = shards[key & _SHARD_MASK]
            holders = shard.get(key)
            if holders is None or not holders & bit:
                continue
            holders ^= bit
            if holders:
                shard[key] = interned.setdefault(holders, holders)
            else:
                del shard[key]
            num_gone += 1
        self._held[slot] -= num_gone
        self._tidy()

    def holders(self, key: int) -> int:
        """The set of endpoints that hold one hash, as bits."""
        return self._shards[key & _SHARD_MASK].get(key, 0) & self._live

    def match(self, keys: Sequence[int], assumed: Mapping[int, int] = NOTHING) -> dict[int, int]:
        """Slot → how many leading hashes it holds, for every endpoint that holds at least one.

        `assumed` holds further sets of endpoints by hash, as `Assumed` keeps them.
        """
        return {
            slot: depth
            for depth, bits in self.match_groups(keys, assumed)
            for slot in slots_of(bits)
        }

    def match_groups(
        self,
        keys: Sequence[int],
        assumed: Mapping[int, int] = NOTHING,
        max_groups: int = sys.maxsize,
    ) -> Groups:
        """Who holds how many leading hashes: (depth, endpoints as bits), the deepest first.

        After `max_groups` of them the rest is not told apart any further: their depths are such as
        they hold at least.
        """
        groups: list[tuple[int, int]] = []
        if not keys:
            return groups
        shards, assumed_at = self._shards, assumed.get
        last = len(keys) - 1
        everywhere = (self.holders(keys[last]) | assumed_at(keys[last], 0)) & self._live
        if everywhere:
            groups.append((last + 1, everywhere))
        first = (self.holders(keys[0]) | assumed_at(keys[0], 0)) & self._live & ~everywhere
        # (low, high, bits): these endpoints hold keys[low] and do not hold keys[high].
        spans = [(0, last, first)] if first and last else []
        while spans:
            low, high, bits = spans.pop()
            while high - low > 1 and len(groups) < max_groups:
                middle = (low + high) >> 1
                key = keys[middle]
                deeper = (shards[key & _SHARD_MASK].get(key, 0) | assumed_at(key, 0)) & bits
                if not deeper:
                    high = middle
                    continue
                if deeper != bits:
                    spans.append((low, middle, bits ^ deeper))
                    bits = deeper
                low = middle
            groups.append((low + 1, bits))
        return groups

    def touch(self, keys: Iterable[int]) -> None:
        """These were matched: keep them longest. Does nothing while the bound is far away."""
        shards = self._shards
        if len(shards[0]) < self._max_per_shard * 3 // 4:
            return  # hashes are uniform, so one shard stands for all
        for key in keys:
            shard = shards[key & _SHARD_MASK]
            holders = shard.pop(key, None)
            if holders is not None:
                shard[key] = holders

    def approximate_bytes(self) -> int:
        """Memory of the entries: tables, keys, and the sets that they share."""
        key_bytes = 48  # an int above 2**60, as the allocator rounds it
        tables = sum(sys.getsizeof(shard) for shard in self._shards)
        sets = sum(sys.getsizeof(holders) for holders in self._interned)
        return tables + key_bytes * len(self) + sets + sys.getsizeof(self._interned)

    def sweep(self) -> bool:
        """Take retired bits out of one shard; whether there is more to do."""
        if not self._sweeping:
            if not self._retired:
                return False
            self._sweeping, self._retired, self._sweep_next = self._retired, 0, 0
        shard = self._shards[self._sweep_next]
        gone = self._sweeping
        stale = [(key, holders & ~gone) for key, holders in shard.items() if holders & gone]
        for key, holders in stale:
            if holders:
                shard[key] = self._interned.setdefault(holders, holders)
            else:
                del shard[key]
        if len(stale) > len(shard):  # a dict gives memory back only when it is made anew
            self._shards[self._sweep_next] = dict(shard)
        self._sweep_next += 1
        if self._sweep_next == NUM_SHARDS:
            self._sweeping = 0
        return bool(self._sweeping or self._retired)

    def check_integrity(self) -> None:
        counted = dict.fromkeys(self._held, 0)
        for number, shard in enumerate(self._shards):
            assert len(shard) <= self._max_per_shard
            for key, holders in shard.items():
                assert key & _SHARD_MASK == number
                assert holders
                for slot in slots_of(holders & self._live):
                    counted[slot] += 1
        assert counted == self._held
        assert not self._live & (self._retired | self._sweeping)

    def _evict_from(self, shard: dict[int, int]) -> None:
        count = max(1, len(shard) // _EVICT_FRACTION)
        for key in list(islice(shard, count)):
            for slot in slots_of(shard.pop(key) & self._live):
                self._held[slot] -= 1
        self.num_evicted += count

    def _tidy(self) -> None:
        if self._retired or self._sweeping:
            self.sweep()
        if len(self._interned) > _MAX_INTERNED:
            # Entries keep their own sets; only sharing with new entries is lost.
            self._interned.clear()


def slots_of(bits: int) -> Iterator[int]:
    """The positions of the bits that are set, lowest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
