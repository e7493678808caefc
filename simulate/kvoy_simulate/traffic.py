"""Requests of a simulation: who asks what and when. Knows no fleet, no policy and no clock.

A prompt is a chain of named pieces instead of token ids. Two chains that begin with the same pieces
stand for prompts that begin with the same tokens, and their hashes agree exactly as far as those
tokens do, whatever the stride. Workloads (`workloads`, `sessions`, `trace`) make requests; the
fleet runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Protocol

from kvoy_contract.blocks import HASH_BYTES, BlockHash

_ROOT = b"kvoy-simulated-root"


class PromptSpec:
    """A prompt as a linked chain: everything before, and one more named piece of some tokens.

    Immutable but for its own piece's hashes, which are made at first use and kept for each stride
    asked for. Chains share what they have in common: a thousand prompts behind one prefix hold its
    hashes once.
    """

    __slots__ = ("_hashes", "_key", "digest", "name", "num_tokens", "parent", "piece_tokens")

    def __init__(self, parent: PromptSpec | None, name: str, piece_tokens: int) -> None:
        """Raises ValueError when the piece has less than one token."""
        if piece_tokens < 1:
            raise ValueError(f"a piece of a prompt has at least 1 token, not {piece_tokens}")
        self.parent = parent
        self.name = name
        self.piece_tokens = piece_tokens
        self.num_tokens: int = piece_tokens + (parent.num_tokens if parent else 0)
        before = parent.digest if parent else _ROOT
        self._key = blake2b(before + name.encode(), digest_size=HASH_BYTES).digest()
        self.digest: BlockHash = self._hash_at(piece_tokens)
        """Stands for all tokens so far."""
        self._hashes: dict[int, list[BlockHash]] = {}

    @classmethod
    def of(cls, *pieces: tuple[str, int]) -> PromptSpec:
        """The chain of these (name, tokens); at least one."""
        prompt: PromptSpec | None = None
        for name, tokens in pieces:
            prompt = cls(prompt, name, tokens)
        if prompt is None:
            raise ValueError("a prompt has at least one piece")
        return prompt

    def then(self, name: str, tokens: int) -> PromptSpec:
        """This prompt, followed by one more piece."""
        return PromptSpec(self, name, tokens)

    def hashes(self, stride: int) -> list[BlockHash]:
        """One per full `stride` tokens, in order, each standing for the whole prefix that ends
        there."""
        pieces: list[list[BlockHash]] = []
        node: PromptSpec | None = self
        while node is not None:
            pieces.append(node._own_hashes(stride))
            node = node.parent
        return list(chain.from_iterable(reversed(pieces)))

    def _own_hashes(self, stride: int) -> list[BlockHash]:
        """Of the strides that end in this piece."""
        made = self._hashes.get(stride)
        if made is None:
            start = self.num_tokens - self.piece_tokens
            ends = range(stride - start % stride, self.piece_tokens + 1, stride)
            made = self._hashes[stride] = [self._hash_at(end) for end in ends]
        return made

    def _hash_at(self, offset: int) -> BlockHash:
        """Of everything up to and with the `offset`-th token of this piece. Depends on what came
        before and the piece's name, not on the piece's length."""
        data = self._key + offset.to_bytes(8, "little")
        return BlockHash(blake2b(data, digest_size=HASH_BYTES).digest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptSpec) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"PromptSpec({self.num_tokens} tokens, ends in {self.name!r})"


@dataclass(frozen=True, slots=True)
class SimRequest:
    arrival_s: float
    """Virtual seconds since the simulation's start."""
    prompt: PromptSpec
    max_tokens: int
    """Tokens of the answer: end tokens are ignored, so it has exactly these."""
    session: str
    """Who asks: equal for all turns of a conversation, else unique."""
    group: str = ""
    """What prompts with one common prefix share; a policy that knows groups goes by it."""
    priority: int = 0
    """Lower runs first."""
    tenant: str = ""
    answer: str = ""
    """Name of the piece that the answer is in later prompts of the session; empty: no later prompt
    contains it."""

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt.num_tokens

    def prompt_and_answer(self) -> PromptSpec:
        """The tokens that are in the engine's cache when the answer is complete."""
        return self.prompt.then(self.answer or f"{self.session}/answer", self.max_tokens)


class Workload(Protocol):
    """One run's requests, the same for the same seed. Used once."""

    def start(self) -> Iterable[SimRequest]:
        """Those that do not wait for others, in order of arrival; may have no end."""
        ...

    def on_finish(self, request: SimRequest, now_s: float) -> SimRequest | None:
        """The session's next request now that this one has its answer; it arrives at `now_s` or
        later. None: the session has ended, or never waits."""
        ...
