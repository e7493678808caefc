"""One choice of one request, from its arrival to its end: its tokens, blocks and counters.

Entities with a life; the scheduler is their one owner and changes them. `Request` is what the
choices share, `SequenceQueue` the order in which they are served.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from kvoy_contract.blocks import BlockHash, TokenIds, block_hashes, next_hash
from kvoy_engine.block_pool import BlockId
from kvoy_engine.core_config import CoreConfig
from kvoy_engine.messages import AddRequest, ChoiceStart, SamplingParams, TokenLogprob

NEVER = 1 << 62


class Status(enum.Enum):
    WAITING = enum.auto()
    """Holds no blocks: new, or preempted."""
    PREFILLING = enum.auto()
    """Holds blocks for all its tokens; some are not computed."""
    DECODING = enum.auto()
    """All its tokens but the last are computed."""
    FINISHED = enum.auto()


class Request:
    """What the choices of one request share."""

    __slots__ = (
        "arrival_s",
        "is_counted",
        "known_hashes",
        "live",
        "params",
        "priority",
        "prompt_hashes",
        "prompt_ids",
        "request_id",
        "seed_hash",
    )

    def __init__(self, message: AddRequest, config: CoreConfig) -> None:
        self.request_id = message.request_id
        self.prompt_ids = message.prompt_ids
        self.params = message.params
        self.arrival_s = message.arrival_s
        self.priority = message.priority
        self.seed_hash = BlockHash(message.seed_hash)
        self.known_hashes = message.known_hashes
        self.prompt_hashes: list[BlockHash] = []
        """Of the prompt's full blocks; none without prefix caching."""
        if config.enable_prefix_caching and message.known_hashes is not None:
            self.prompt_hashes = message.known_hashes[: len(self.prompt_ids) // config.block_size]
        elif config.enable_prefix_caching:
            self.prompt_hashes = block_hashes(self.seed_hash, message.prompt_ids, config.block_size)
        self.live: dict[int, Sequence] = {}
        """The unfinished sequences by choice."""
        self.is_counted = False
        """Whether its prompt is in the totals of prompt and cached tokens."""


class Sequence:
    """`tokens` are prompt and output; `num_computed` of them have their KV in the blocks of the
    table."""

    __slots__ = (
        "block_size",
        "block_table",
        "blocked_on",
        "choice",
        "first_scheduled_s",
        "hashes",
        "key",
        "next_full",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "num_registered",
        "output_ids",
        "params",
        "prompt_ids",
        "prompt_logprobs",
        "queued_tokens",
        "request",
        "seq_id",
        "served_s",
        "status",
        "stop_ids",
        "token_limit",
    )

    def __init__(
        self, seq_id: int, request: Request, start: ChoiceStart, config: CoreConfig
    ) -> None:
        params: SamplingParams = request.params
        self.seq_id = seq_id
        self.request = request
        self.choice = start.index
        self.params = params
        self.prompt_ids = request.prompt_ids
        self.output_ids = list(start.output_ids)
        self.block_size = config.block_size
        self.key = (request.priority, request.arrival_s, seq_id)
        """The order of service: priority, then arrival. See `background` for a change of it."""
        self.status = Status.WAITING
        self.stop_ids = frozenset(params.stop_token_ids)
        self.token_limit = min(config.token_limit, len(self.prompt_ids) + params.max_tokens)
        """Number of tokens at which the sequence ends with `length`."""
        self.block_table: list[BlockId] = []
        self.num_computed = 0
        self.num_registered = 0
        """Leading blocks of the table that are registered."""
        self.hashes = list(request.prompt_hashes)
        """Of the full blocks of its tokens; those of output blocks follow when they are full."""
        self.next_full = config.block_size if config.enable_prefix_caching else NEVER
        """The value of `num_computed` at which the next block can be registered."""
        self.num_cached_tokens = 0
        """Tokens found in the cache when it first ran; finding its own work again does not
        count."""
        self.num_preemptions = 0
        self.first_scheduled_s: float | None = None
        self.served_s = request.arrival_s
        """When a part of its prompt was last computed, or it came or was preempted."""
        self.blocked_on: BlockHash | None = None
        """While it waits: the first block that it did not find in the cache, if it could use it."""
        self.queued_tokens = 0
        """Its part of the count of prompt tokens that are accepted but not computed."""
        wants_prompt = params.prompt_logprobs is not None and start.index == 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] if wants_prompt else None
        """Collected chunk by chunk; None when not wanted or handed out."""
        if config.enable_prefix_caching:
            for index in range(len(self.hashes), self.num_tokens // config.block_size):
                self.block_hash(index)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed

    @property
    def samples(self) -> bool:
        """Whether its next output token is wanted (a request for no tokens only scores its
        prompt)."""
        return self.num_tokens < self.token_limit

    def tokens(self, start: int, end: int) -> TokenIds:
        """Ids of the positions start .. end - 1."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : end - num_prompt]
        return [*self.prompt_ids[start:], *self.output_ids[: end - num_prompt]]

    def block_hash(self, index: int) -> BlockHash:
        """The hash of a full block; blocks are asked for in order."""
        hashes = self.hashes
        if index == len(hashes):
            known = self.request.known_hashes
            if known is not None:
                hashes.append(known[index])
                return hashes[index]
            parent = hashes[-1] if hashes else self.request.seed_hash
            start = index * self.block_size
            hashes.append(next_hash(parent, self.tokens(start, start + self.block_size)))
        return hashes[index]


class SequenceQueue:
    """Sequences in the order of their keys. Joining and leaving is a bisection and a short
    memmove."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Sequence] = []
        """In order; for reading and for iterating while only the end is taken away."""

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    def add(self, seq: Sequence) -> None:
        insort(self.items, seq, key=_key)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self.items, seq.key, key=_key)
        assert self.items[index] is seq
        del self.items[index]

    def __contains__(self, seq: Sequence) -> bool:
        index = bisect_left(self.items, seq.key, key=_key)
        return index < len(self.items) and self.items[index] is seq


_key = attrgetter("key")
