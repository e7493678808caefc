"""What the requests of a router may cost it in memory: one budget, and who may have how much of it.

A request is counted from its first byte to the end of its answer. A small one takes what it needs
of whatever is left. A large body needs a place first, for all that will be held of it, and its
client is not read from until there is one; and it needs a place while it is decoded, and one while
its prompt is encoded, for what is made of it meanwhile. Places of each kind are given in the order
in which they were asked for, except that what would not fit even alone now keeps nobody waiting.
They are only parts of the budget, so that small requests find room beside any number of large
ones. Among the small ones short ones have the last part for themselves, and decode at once; the
others have places for that too.

Nobody waits for a place of a kind that it has one of, and all wait in the same order of kinds
(held, decoding, encoding): so whoever has the last of them goes on. Pure: knows no socket and no
clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SMALL_BODY_BYTES = 64 * 1024
"""Larger ones ask for places."""
REQUEST_BYTES = 24 * 1024
"""Of a request besides its body: its tasks, its two connections, what a stream's progress begins
with."""
SHORT_BODY_BYTES = 4096
"""Up to so much a request waits for nobody: it is decoded and encoded at once."""
_PARTS = 32
_HELD, _UNREAD, _DECODING, _ENCODING, _READING = 10, 2, 8, 7, 1
_LEAST_READING_BYTES = 52 * SMALL_BODY_BYTES
"""What the worst small body is decoded to: wide texts, structure, and half as many token ids."""
_PLACES = 28
"""All of them; what is left is for small requests alone, and the last part for short ones."""


class Claim:
    """A place, or the wish for one."""

    __slots__ = ("_on_room", "_room", "is_held", "meanwhile", "num_bytes")

    def __init__(self, room: Room, num_bytes: int, on_room: Callable[[], None] | None) -> None:
        self._room = room
        self._on_room = on_room
        self.num_bytes = num_bytes
        self.is_held = False
        self.meanwhile: Claim | None = None
        """Another one, which ends when this one is held or given up."""

    def end(self) -> None:
        """Give it back, or up. May be called again."""
        self._on_room = None
        self._room.forget(self)
        self._end_meanwhile()

    def resize(self, num_bytes: int) -> bool:
        """Have, or wish for, so much from now on; False, and as much as before, where there is no
        room."""
        return self._room.resize(self, num_bytes)

    def grant(self) -> None:
        self.is_held = True
        self._end_meanwhile()
        on_room, self._on_room = self._on_room, None
        if on_room is not None:
            on_room()

    def _end_meanwhile(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile.end()


class Room:
    """Places of one kind. Several small ones may stand for a large one that nobody has."""

    def __init__(self, memory: BodyMemory, parts: int, least_bytes: int = 0) -> None:
        """`least_bytes`: a room for small requests, which have so much whatever else has grown."""
        self._memory = memory
        self._parts = parts
        self._least_bytes = least_bytes
        self._queue: deque[Claim] = deque()
        self._aside: list[Claim] = []
        """Those that wait until the room itself is larger; the others do not wait for them."""
        self.used_bytes = 0
        self.max_bytes = 0

    @property
    def most_bytes(self) -> int:
        """The largest place that there can ever be."""
        return max(self._memory.most_bytes * self._parts // _PARTS, self._least_bytes)

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._aside)

    def claim(self, num_bytes: int, on_room: Callable[[], None] | None = None) -> Claim:
        """A place: `is_held` at once, or `on_room` is called when it is."""
        claim = Claim(self, num_bytes, on_room)
        if not self._queue and self._has_room(num_bytes):
            self._take(num_bytes)
            claim.is_held = True
        else:
            self._line_of(claim).append(claim)
            self._memory.num_waiting += 1
        return claim

    def forget(self, claim: Claim) -> None:
        if claim.is_held:
            claim.is_held = False
            self._take(-claim.num_bytes)
        elif claim in (line := self._line_of(claim)):
            line.remove(claim)
            self._memory.num_waiting -= 1
        self._memory.wake()

    def resize(self, claim: Claim, num_bytes: int) -> bool:
        if not claim.is_held:
            claim.num_bytes = num_bytes
            self._line_up()
            self._memory.wake()
            return True
        more = num_bytes - claim.num_bytes
        if more > 0 and not self._has_room(more):
            return False
        claim.num_bytes = num_bytes
        self._take(more)
        if more < 0:
            self._memory.wake()
        return True

    def use(self, budget_bytes: int) -> None:
        self.max_bytes = max(budget_bytes * self._parts // _PARTS, self._least_bytes)
        self._line_up()

    def grant_first(self) -> bool:
        """The first that waits gets its place, if it fits."""
        if not self._queue or not self._has_room(self._queue[0].num_bytes):
            return False
        claim = self._queue.popleft()
        self._memory.num_waiting -= 1
        self._take(claim.num_bytes)
        claim.grant()
        return True

    def _line_of(self, claim: Claim) -> deque[Claim] | list[Claim]:
        """Where it waits."""
        return self._queue if claim.num_bytes <= self.max_bytes else self._aside

    def _line_up(self) -> None:
        """After a change of what is wished for or of what there is. Who stood aside comes first."""
        if self._aside or any(claim.num_bytes > self.max_bytes for claim in self._queue):
            waiting = [*self._aside, *self._queue]
            self._aside, self._queue = [], deque()
            for claim in waiting:
                self._line_of(claim).append(claim)

    def _has_room(self, num_bytes: int) -> bool:
        memory = self._memory
        bound = memory.max_small_bytes if self._least_bytes else memory.max_shared_bytes
        return (
            self.used_bytes + num_bytes <= self.max_bytes and memory.used_bytes + num_bytes <= bound
        )

    def _take(self, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self._memory.used_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """In bytes."""

    now: int
    """What requests may have at this moment."""
    most: int
    """What they could have if nothing else of this process had grown."""
    least: int = 0
    """What small ones may have whatever else has grown."""


class BodyMemory:
    """One for all listeners of a router."""

    def __init__(self, budget: Budget) -> None:
        self.used_bytes = 0
        """Read and written by listeners for every request."""
        self.num_waiting = 0
        """For places of any kind."""
        self.max_bytes = 0
        self.max_small_bytes = 0
        self.max_shared_bytes = 0
        self.most_bytes = 0
        self.held = Room(self, _HELD)
        """Large bodies, from before they are read to the end of their answers, and token ids."""
        self.unread = Room(self, _UNREAD)
        """What had come of large bodies when they began to wait."""
        self.decoding = Room(self, _DECODING)
        """What large bodies are decoded to."""
        self.encoding = Room(self, _ENCODING)
        """What is made of long prompts until they are token ids."""
        self.reading = Room(self, _READING, _LEAST_READING_BYTES)
        """What small bodies that are not short are decoded to, until they are token ids."""
        self._rooms = (self.held, self.unread, self.decoding, self.encoding, self.reading)
        self.use(budget)

    def use(self, budget: Budget) -> None:
        """From now on; what is held stays."""
        self.most_bytes = budget.most
        self.max_bytes = max(budget.now, budget.least)
        self.max_small_bytes = self.max_bytes * (_PARTS - 1) // _PARTS
        self.max_shared_bytes = budget.now * _PLACES // _PARTS
        for room in self._rooms:
            room.use(budget.now)
        self.wake()

    def take(self, num_bytes: int) -> bool:
        """Memory for a small request; False (and nothing taken) beyond the budget."""
        is_short = num_bytes <= SHORT_BODY_BYTES
        max_bytes = self.max_bytes if is_short else self.max_small_bytes
        if self.used_bytes + num_bytes > max_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        if self.num_waiting:
            self.wake()

    def exchange(self, old_bytes: int, new_bytes: int) -> int:
        """Give back and take, as `take` does; returns what is held now."""
        self.give_back(old_bytes)
        return new_bytes if self.take(new_bytes) else 0

    def wake(self) -> None:
        """Places for those that wait, as far as there are."""
        if self.num_waiting:
            for room in self._rooms:
                while room.grant_first():
                    pass
