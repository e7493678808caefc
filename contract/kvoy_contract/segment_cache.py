"""Remembers the token ids of pieces of text: a chat's next turn encodes only its tail."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from hashlib import blake2b

DEFAULT_MAX_BYTES = 32 << 20
_ENTRY_OVERHEAD_BYTES = 256
"""Of the key, the array's head and the two links, rounded up."""
_DIGEST_CHARS = 32
"""Shorter texts, what a template writes between messages above all, are their own key."""


class SegmentCache:
    """Least recently used first out, bounded by its estimated bytes. Safe to use from several
    threads.

    The key of a longer text is a 128-bit digest: only short texts are kept themselves.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str | bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, text: str) -> array[int] | None:
        """The ids of exactly this text; the caller does not change them."""
        key = _key(text)
        with self._lock:
            ids = self._entries.get(key)
            if ids is None:
                self.num_misses += 1
                return None
            self._entries.move_to_end(key)
            self.num_hits += 1
            return ids

    def put(self, text: str, ids: array[int]) -> None:
        """Keep the ids, unless they alone would fill an eighth of the cache."""
        size = _size(ids)
        if size * 8 > self.max_bytes:
            return
        key = _key(text)
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                _, evicted = self._entries.popitem(last=False)
                self.num_bytes -= _size(evicted)


def _key(text: str) -> str | bytes:
    if len(text) < _DIGEST_CHARS:
        return text
    return blake2b(text.encode(), digest_size=16).digest()


def _size(ids: array[int]) -> int:
    return _ENTRY_OVERHEAD_BYTES + len(ids) * ids.itemsize
