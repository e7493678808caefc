"""What the client of one stream has been told, so that another engine can go on behind it."""

from __future__ import annotations

from kvoy_contract.envelope import ResumeState
from kvoy_contract.sse import parse_token_ids
from kvoy_router.endpoint import EngineInfo
from kvoy_router.failover import GaveUp
from kvoy_router.resume_memory import STEP_BYTES, ResumeMemory


class StreamProgress:
    """Entity of one streamed request. Token ids are kept as their text in the stream, about 13
    bytes each, and read only when they are needed."""

    __slots__ = (
        "_allowed_bytes",
        "_max_bytes",
        "_memory",
        "_settled_bytes",
        "_taken_bytes",
        "answer_id",
        "cached_tokens",
        "created",
        "engine",
        "lost",
        "resume",
        "said",
    )

    def __init__(self, answer_id: str, created: int, max_bytes: int, memory: ResumeMemory) -> None:
        """`max_bytes` bounds what is remembered, `memory` that of all streams; beyond either the
        stream cannot be resumed."""
        self._max_bytes = max_bytes
        self._memory = memory
        self._settled_bytes = self._taken_bytes = self._allowed_bytes = 0
        self.answer_id = answer_id
        self.created = created
        self.said = bytearray()
        """A line, and perhaps empty ones, for every write that the client has got. Always the same
        object: the hot path adds to it, and `settle` is called some times a second."""
        self.lost: GaveUp | None = None
        """Why the stream cannot be resumed."""
        self.engine: EngineInfo | None = None
        """Who began it; the next one must serve the very same model."""
        self.cached_tokens: int | None = None
        """As the first engine has found."""
        self.resume: ResumeState | None = None
        """With what the present attempt goes on; None for one from the beginning."""

    def take(self, line: bytes) -> None:
        """What the write that is told now says: the text of its ids, with its line end."""
        self.said += line
        self.settle()

    def settle(self) -> bool:
        """Bring the bounds up to date. Whether anything was said since the last time."""
        num_bytes = len(self.said)
        if num_bytes == self._settled_bytes:
            return False
        if self.lost is not None:
            self.said.clear()
            num_bytes = 0
        self._settled_bytes = num_bytes
        if num_bytes > self._allowed_bytes:
            self._grow()
        return True

    def _grow(self) -> None:
        num_bytes = len(self.said)
        if num_bytes > self._max_bytes:
            self.lose(GaveUp.TOO_LONG)
            return
        while self._taken_bytes < num_bytes:
            if not self._memory.take():
                self.lose(GaveUp.NO_MEMORY)
                return
            self._taken_bytes += STEP_BYTES
        self._allowed_bytes = min(self._taken_bytes, self._max_bytes)

    def close(self) -> None:
        """The request has ended: nothing is remembered any more."""
        self.said.clear()
        self._memory.give_back(self._taken_bytes)
        self._settled_bytes = self._taken_bytes = self._allowed_bytes = 0

    @property
    def num_told_tokens(self) -> int | None:
        """Of the answer so far; None where the engine does not say, or it became too long."""
        self.settle()
        if self.lost is not None:
            return None
        # In `0 12,13!;1 7` each choice has a space before its ids, and may have none.
        said = self.said
        num_lists = said.count(b" ") - said.count(b" !") - said.count(b" ;") - said.count(b" \n")
        return said.count(b",") + num_lists

    def lose(self, reason: GaveUp) -> None:
        self.close()
        self.lost = reason

    def restart(self) -> None:
        """Nothing has reached the client: the next attempt begins anew."""
        self.close()
        self.lost = self.engine = self.cached_tokens = self.resume = None

    def prepare_resume(self, num_choices: int) -> GaveUp | None:
        """Set `resume`, or say why there can be none."""
        self.settle()
        if self.lost is None:
            try:
                self.resume = self._state(num_choices)
            except (ValueError, IndexError):
                self.lose(GaveUp.MALFORMED)
        return self.lost

    def _state(self, num_choices: int) -> ResumeState:
        output_ids: list[list[int]] = [[] for _ in range(num_choices)]
        begun, ended = set(), set()
        for line in bytes(self.said).splitlines():
            for choice, token_ids, is_ended in parse_token_ids(line) if line else ():
                output_ids[choice] += token_ids
                begun.add(choice)
                if is_ended:
                    ended.add(choice)
        return ResumeState(output_ids, sorted(begun), sorted(ended), self.cached_tokens)
