"""Remembers how the beginnings of rendered chats were encoded: a long conversation's next turn
costs what its tail costs, not a look at every message of its past.

A beginning ends at a control token, so its ids do not depend on what follows. It is kept with its
text: whoever asks gets a beginning that is equal to the last character, never one that hashes
alike.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator

DEFAULT_MAX_BYTES = 64 << 20
MIN_CHARS = 4096
"""Encoding less from its remembered pieces costs as little as finding it here."""
_WINDOW_CHARS = 48
_ENTRY_OVERHEAD_BYTES = 512
_MAX_ALIKE = 8
"""Beginnings under one key: a few may differ only between the places that keys look at."""

Key = tuple[int, str]


class KnownPrefix:
    """The beginning of a prompt. `text` and `ids` never change; `notes` are whatever the encoder's
    user derives from them, by its own keys."""

    __slots__ = ("ids", "notes", "sentinel", "text")

    def __init__(
        self, text: str, sentinel: str, ids: array[int], shorter: KnownPrefix | None = None
    ) -> None:
        """What is noted of a `shorter` beginning of this one is noted of this one too."""
        self.text = text
        self.sentinel = sentinel
        self.ids = ids
        self.notes: dict[object, object] = dict(shorter.notes) if shorter else {}

    @property
    def num_bytes(self) -> int:
        return (
            _ENTRY_OVERHEAD_BYTES + sys.getsizeof(self.text) + 2 * self.ids.itemsize * len(self.ids)
        )


class KnownPrefixes:
    """Least recently used first out, bounded by bytes. Safe to use from several threads."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._by_age: OrderedDict[int, KnownPrefix] = OrderedDict()
        self._by_key: dict[Key, list[KnownPrefix]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def find(self, text: str, sentinel: str) -> KnownPrefix | None:
        """The longest known beginning of `text`, or one nearly as long."""
        with self._lock:
            for key in _keys(text):
                alike = [
                    known
                    for known in self._by_key.get(key, ())
                    if known.sentinel == sentinel and text.startswith(known.text)
                ]
                if alike:
                    found = max(alike, key=lambda known: len(known.text))
                    self._by_age.move_to_end(id(found))
                    return found
        return None

    def add(self, known: KnownPrefix) -> None:
        """Keep it, unless it is short or would fill an eighth of the room alone."""
        key = next(_keys(known.text), None)
        if key is None or 8 * known.num_bytes > self.max_bytes:
            return
        with self._lock:
            alike = self._by_key.setdefault(key, [])
            if any(known.text == other.text for other in alike):
                return
            if len(alike) == _MAX_ALIKE:
                self._drop(alike[0])
                alike = self._by_key.setdefault(key, [])
            alike.append(known)
            self._by_age[id(known)] = known
            self.num_bytes += known.num_bytes
            while self.num_bytes > self.max_bytes:
                self._drop(next(iter(self._by_age.values())))

    def _drop(self, known: KnownPrefix) -> None:
        del self._by_age[id(known)]
        self.num_bytes -= known.num_bytes
        key = next(_keys(known.text))
        alike = self._by_key[key]
        alike.remove(known)
        if not alike:
            del self._by_key[key]


def _keys(text: str) -> Iterator[Key]:
    """What stands before each of a series of places in a text, the farthest first. A beginning is
    kept under its own farthest place, which is one of the places of every text that goes on."""
    place = MIN_CHARS
    places = []
    while place <= len(text):
        places.append(place)
        place += place // 4
    for place in reversed(places):
        yield place, text[place - _WINDOW_CHARS : place]
