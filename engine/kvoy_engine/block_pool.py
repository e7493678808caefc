"""Paged KV blocks: who uses which, which hold reusable work, and which is given up next.

A block is free (holds nothing), used (at least one sequence has it in its table) or evictable
(holds registered work that nobody uses now). The pool knows block ids and hashes; it knows neither
sequences nor where the bytes are. Its owner is the scheduler.

Registered blocks form a forest: each knows the registered block before it. The set is closed under
"the block before": a sequence registers its blocks in order and gives them back last first, two
blocks of equal content are folded into one, and whoever uses a block uses all before it. So in the
eviction list a block always stands before its parent, and evicting the least recently used one
never cuts a chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NewType

from kvoy_contract.blocks import BlockHash
from kvoy_engine.messages import BlockEvents

BlockId = NewType("BlockId", int)

NO_BLOCK = BlockId(-1)
"""The parent of a sequence's first block."""


class OutOfBlocks(Exception):
    """More blocks were asked for than are free or evictable; nothing has changed."""


class BlockPool:
    """All operations are O(1) per block. Lists are indexed by block id."""

    def __init__(self, num_blocks: int, blocks_per_stride: int = 1) -> None:
        if num_blocks < 1 or blocks_per_stride < 1:
            raise ValueError("a pool has at least one block, a stride at least one block")
        self.num_blocks = num_blocks
        self._blocks_per_stride = blocks_per_stride
        ids = [BlockId(i) for i in range(num_blocks + 1)]  # the lists share these objects
        self._free = ids[-2::-1]  # a stack
        self._num_users = [0] * num_blocks
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._parent = [NO_BLOCK] * num_blocks
        self._num_children = [0] * num_blocks
        self._depth = [0] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        # The eviction list, doubly linked through two arrays; index num_blocks is head and tail.
        self._next: list[int] = list(ids)
        self._previous: list[int] = list(ids)
        self._end = num_blocks
        self._next[self._end] = self._previous[self._end] = self._end
        self._num_evictable = 0
        # Net changes of the reported hashes since the last drain, in order.
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._cleared = False

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + self._num_evictable

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take blocks for one user, free ones first, then the least recently used evictable ones.

        Raises OutOfBlocks, with nothing changed.
        """
        if num_blocks > len(self._free) + self._num_evictable:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_available} available")
        taken = []
        for _ in range(num_blocks):
            block = self._free.pop() if self._free else self._evict()
            self._num_users[block] = 1
            taken.append(block)
        return taken

    def find_prefix(self, hashes: Sequence[BlockHash], limit: int) -> list[BlockId]:
        """The registered blocks of the longest prefix of `hashes`, at most `limit`; takes none."""
        by_hash = self._by_hash
        found = []
        for i in range(min(limit, len(hashes))):
            block = by_hash.get(hashes[i])
            if block is None:
                break
            found.append(block)
        return found

    def num_evictable_of(self, blocks: Iterable[BlockId]) -> int:
        """How many of these blocks `acquire` would take out of the evictable ones."""
        num_users = self._num_users
        return sum(1 for block in blocks if num_users[block] == 0)

    def acquire(self, blocks: Iterable[BlockId]) -> None:
        """Become one more user of these registered blocks."""
        num_users = self._num_users
        for block in blocks:
            if num_users[block] == 0:
                self._unlink(block)
            num_users[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give back a table, or the end of one; the last block becomes evictable first."""
        num_users = self._num_users
        for block in reversed(blocks):
            num_users[block] -= 1
            if num_users[block]:
                continue
            if self._hash[block] is None:
                self._free.append(block)
            else:
                self._link_last(block)

    def register(self, block: BlockId, block_hash: BlockHash, parent: BlockId) -> BlockId:
        """Make a full, computed block findable, and return the block that stands for its content.

        That is another one when the content was there already: its caller then uses that one in the
        place of `block`, which is given back. `parent` is the registered block before it in the
        table.
        """
        known = self._by_hash.get(block_hash)
        if known is not None:
            if known != block:
                self.acquire((known,))
                self.release((block,))
            return known
        assert self._hash[block] is None
        assert self._num_users[block] > 0
        self._hash[block] = block_hash
        self._by_hash[block_hash] = block
        self._parent[block] = parent
        if parent == NO_BLOCK:
            self._depth[block] = 1
        else:
            assert self._hash[parent] is not None
            self._depth[block] = self._depth[parent] + 1
            self._num_children[parent] += 1
        if self._is_reported(block):
            self._note_stored(block_hash)
        return block

    def forget(self, blocks: Sequence[BlockId]) -> None:
        """Unregister the end of a table as far as one user alone has it and nothing follows it.

        For work that is known to be broken. The blocks stay used until they are released.
        """
        for block in reversed(blocks):
            if self._num_users[block] > 1 or self._num_children[block]:
                return
            if self._hash[block] is not None:
                self._unregister(block)

    def reset(self) -> None:
        """Forget every evictable block; what is used stays registered."""
        while self._num_evictable:
            self._free.append(self._evict())
        self._removed.clear()
        self._cleared = True
        self._stored = dict.fromkeys(self.reported_hashes())

    def reported_hashes(self) -> list[BlockHash]:
        """The hashes that events have announced and not withdrawn: those at the end of a stride."""
        return [h for h, block in self._by_hash.items() if self._is_reported(block)]

    def drain_events(self) -> BlockEvents:
        """The changes of `reported_hashes()` since the last call."""
        if not (self._stored or self._removed or self._cleared):
            return _NO_EVENTS
        events = BlockEvents(
            removed=list(self._removed), stored=list(self._stored), cleared=self._cleared
        )
        self._stored, self._removed, self._cleared = {}, {}, False
        return events

    # A hash that comes and goes between two drains leaves no event, whichever way round.

    def _note_stored(self, block_hash: BlockHash) -> None:
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def _note_removed(self, block_hash: BlockHash) -> None:
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def _is_reported(self, block: BlockId) -> bool:
        return self._depth[block] % self._blocks_per_stride == 0

    def _evict(self) -> BlockId:
        block = BlockId(self._next[self._end])
        assert block != self._end
        assert self._num_children[block] == 0
        self._unlink(block)
        self._unregister(block)
        return block

    def _unregister(self, block: BlockId) -> None:
        block_hash = self._hash[block]
        assert block_hash is not None
        self._hash[block] = None
        del self._by_hash[block_hash]
        parent = self._parent[block]
        if parent != NO_BLOCK:
            self._num_children[parent] -= 1
        if self._is_reported(block):
            self._note_removed(block_hash)

    def _link_last(self, block: BlockId) -> None:
        last = self._previous[self._end]
        self._next[last] = block
        self._previous[block] = last
        self._next[block] = self._end
        self._previous[self._end] = block
        self._num_evictable += 1

    def _unlink(self, block: BlockId) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._num_evictable -= 1

    def check_integrity(self, tables: Iterable[Sequence[BlockId]] | None = None) -> None:
        """Assert every invariant; with all users' `tables`, also that each use is one of theirs."""
        free = set(self._free)
        assert len(free) == len(self._free)
        evictable: list[BlockId] = []
        at = self._next[self._end]
        while at != self._end:
            assert self._previous[self._next[at]] == at
            assert len(evictable) < self.num_blocks
            evictable.append(BlockId(at))
            at = self._next[at]
        assert len(evictable) == self._num_evictable
        order = {block: i for i, block in enumerate(evictable)}
        num_children = [0] * self.num_blocks
        for i in range(self.num_blocks):
            block, users, block_hash = BlockId(i), self._num_users[i], self._hash[i]
            assert users >= 0
            assert (block in free) == (users == 0 and block_hash is None)
            assert (block in order) == (users == 0 and block_hash is not None)
            if block_hash is None:
                continue
            assert self._by_hash[block_hash] == block
            parent = self._parent[block]
            assert (parent == NO_BLOCK) == (self._depth[block] == 1)
            if parent != NO_BLOCK:
                num_children[parent] += 1
                assert self._hash[parent] is not None
                assert self._depth[parent] + 1 == self._depth[block]
                assert self._num_users[parent] >= users
                assert parent not in order or order[block] < order[parent]
        assert num_children == self._num_children
        assert len(self._by_hash) == sum(h is not None for h in self._hash)
        if tables is not None:
            uses = [0] * self.num_blocks
            for table in tables:
                assert len(set(table)) == len(table)
                for block in table:
                    uses[block] += 1
            assert uses == self._num_users


_NO_EVENTS = BlockEvents()
