"""Policies to compare with. None of them is offered for serving.

partition           every group has one fixed engine, and all engines equally many groups
session-hash        a session's engine is a hash of its name (rendezvous hashing)
sticky              a session stays where its first request was least loaded
prefix-only         the engine that holds most of the prompt, whatever its load
approximate-prefix  the weights llm-d has without configuration (prefix 3, queue 2, memory 2), over
                    an index of what was sent where, since nobody tells it what was evicted, and
                    queue and memory as scraped from the engines' metrics every 50 ms
holder-18s          llm-d's optimised baseline: who holds 80 % of the prompt, unless its queue of
                    prompts is 18 s longer than the shortest; among those the shortest queue

The two of llm-d follow its documentation of August 2026. `holder-18s` counts what it has sent
itself, as the original does, and sees besides what Kvoy sees of queues. A session is known by the
request's `affinity`, a group by the first hash of the prompt.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random

from kvoy_contract.blocks import BlockHash
from kvoy_router.cost import Traffic
from kvoy_router.decision import Candidate
from kvoy_router.endpoint import Endpoint
from kvoy_router.policies import POLICIES, LeastLoad, Policy, View
from kvoy_router.request import InferenceRequest

Choice = tuple[int, tuple[Candidate, ...]]


class Partition:
    """Groups take engines in turn when they first appear, which is the balanced partition of groups
    that are known beforehand. A group whose engine is away goes to the least loaded one meanwhile.
    Each router has a partition of its own, so it is a baseline for one router."""

    name = "partition"

    def __init__(self, random: Random) -> None:
        self._elsewhere = LeastLoad(random)
        self._homes: dict[BlockHash, str] = {}
        self._engines: list[str] = []

    def choose(self, request: InferenceRequest, views: Sequence[View], traffic: Traffic) -> Choice:
        if not self._engines:
            self._engines = sorted(view.endpoint.id for view in views)
        if request.hashes:
            group = request.hashes[0]
            turn = self._engines[len(self._homes) % len(self._engines)]
            home = self._homes.setdefault(group, turn)
            for position, view in enumerate(views):
                if view.endpoint.id == home:
                    return position, _candidates(views, [0.0] * len(views))
        return self._elsewhere.choose(request, views, traffic)


class SessionHash:
    name = "session-hash"

    def __init__(self, random: Random) -> None:
        """Nothing is left to chance."""

    def choose(self, request: InferenceRequest, views: Sequence[View], traffic: Traffic) -> Choice:
        scores = [_rendezvous(request.affinity, view.endpoint) for view in views]
        return scores.index(min(scores)), _candidates(views, scores)


class Sticky:
    name = "sticky"

    def __init__(self, random: Random) -> None:
        self._first = LeastLoad(random)
        self._homes: dict[bytes, str] = {}

    def choose(self, request: InferenceRequest, views: Sequence[View], traffic: Traffic) -> Choice:
        home = self._homes.get(request.affinity)
        for position, view in enumerate(views):
            if view.endpoint.id == home:
                return position, _candidates(views, [0.0] * len(views))
        position, candidates = self._first.choose(request, views, traffic)
        self._homes[request.affinity] = views[position].endpoint.id
        return position, candidates


class PrefixOnly:
    name = "prefix-only"

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, request: InferenceRequest, views: Sequence[View], traffic: Traffic) -> Choice:
        scores = [-float(view.cached_tokens) for view in views]
        return _least(scores, self._random), _candidates(views, scores)


class ApproximatePrefix:
    name = "approximate-prefix"

    PREFIX_WEIGHT = 3.0
    QUEUE_WEIGHT = 2.0
    MEMORY_WEIGHT = 2.0
    UNKNOWN_CAPACITY = 31_250
    """Hashes kept of an engine that does not tell its number of blocks."""
    SCRAPE_S = 0.05
    """Between two looks at an engine's metrics."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._sent: dict[str, OrderedDict[BlockHash, None]] = {}
        """Of each engine the hashes that were sent there, the latest last."""
        self._scraped: dict[str, tuple[float, int, float]] = {}
        """Of each engine when it was last looked at, its queue and its unused memory then."""

    def choose(self, request: InferenceRequest, views: Sequence[View], traffic: Traffic) -> Choice:
        matched = self._matched(request, views)
        seen = [self._look_at(view.endpoint) for view in views]
        queues = [queue for queue, _ in seen]
        least, most = min(queues), max(queues)
        scores = [
            -self.PREFIX_WEIGHT * share
            - self.QUEUE_WEIGHT * ((most - queue) / (most - least) if most > least else 1.0)
            - self.MEMORY_WEIGHT * unused
            for share, (queue, unused) in zip(matched, seen, strict=True)
        ]
        position = _least(scores, self._random)
        self._remember(views[position].endpoint, request)
        return position, _candidates(views, scores)

    def _look_at(self, endpoint: Endpoint) -> tuple[int, float]:
        """Sequences that wait there, and the share of blocks that none uses, as the engine's own
        metrics told when they were last scraped: what was sent there since is not in them."""
        at_s, queue, unused = self._scraped.get(endpoint.id, (-math.inf, 0, 1.0))
        load = endpoint.load
        if load is not None and endpoint.load_s - at_s >= self.SCRAPE_S:
            queue = load.waiting
            if load.total_blocks:
                unused = (load.free_blocks + load.evictable_blocks) / load.total_blocks
            self._scraped[endpoint.id] = (endpoint.load_s, queue, unused)
        return queue, unused

    def _matched(self, request: InferenceRequest, views: Sequence[View]) -> list[float]:
        """For each engine the share of the prompt's hashes that were sent to it, up to the first
        one that was sent to none. One that has lost an earlier hash is still credited for the
        others, as in the original."""
        sent = [self._sent.get(view.endpoint.id) or OrderedDict() for view in views]
        counts = [0] * len(views)
        for key in request.hashes:
            holders = [position for position, hashes in enumerate(sent) if key in hashes]
            if not holders:
                break
            for position in holders:
                counts[position] += 1
        return [count / max(len(request.hashes), 1) for count in counts]

    def _remember(self, endpoint: Endpoint, request: InferenceRequest) -> None:
        """As many hashes as the engine has blocks, though each stands for a longer stride: so does
        the original."""
        sent = self._sent.setdefault(endpoint.id, OrderedDict())
        for key in request.hashes:
            sent[key] = None
            sent.move_to_end(key)
        blocks = endpoint.info.num_blocks if endpoint.info else 0
        for _ in range(len(sent) - (blocks or self.UNKNOWN_CAPACITY)):
            sent.popitem(last=False)


class Holder:
    name = "holder-18s"

    MATCH_SHARE = 0.8
    MAX_PENALTY_S = 18.0

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, request: InferenceRequest, views: Sequence[View], traffic: Traffic) -> Choice:
        waits_s = [v.occupancy.queued_tokens / v.occupancy.prefill_tokens_per_s for v in views]
        wanted = self.MATCH_SHARE * request.num_prompt_tokens
        holders = [i for i, view in enumerate(views) if view.cached_tokens >= max(wanted, 1.0)]
        others = [i for i in range(len(views)) if i not in holders]
        kept = holders or others
        if holders and others:
            penalty_s = min(waits_s[i] for i in holders) - min(waits_s[i] for i in others)
            if penalty_s > self.MAX_PENALTY_S:
                kept = holders + others
        loads = [
            v.occupancy.queued_tokens + request.num_prompt_tokens - v.cached_tokens for v in views
        ]
        best = kept[_least([loads[i] for i in kept], self._random)]
        return best, _candidates(views, loads)


BASELINES: dict[str, Callable[[Random], Policy]] = {
    "partition": Partition,
    "session-hash": SessionHash,
    "sticky": Sticky,
    "prefix-only": PrefixOnly,
    "approximate-prefix": ApproximatePrefix,
    "holder-18s": Holder,
}
EVERY_POLICY: dict[str, Callable[[Random], Policy]] = {**POLICIES, **BASELINES}


def policy_maker(name: str) -> Callable[[Random], Policy]:
    """Raises ValueError for an unknown name."""
    if name not in EVERY_POLICY:
        raise ValueError(f"policy must be one of {', '.join(EVERY_POLICY)}, not {name!r}")
    return EVERY_POLICY[name]


def _rendezvous(key: bytes, endpoint: Endpoint) -> float:
    digest = blake2b(key + b"\0" + endpoint.id.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "little"))


def _least(scores: Sequence[float], random: Random) -> int:
    lowest = min(scores)
    return random.choice([i for i, score in enumerate(scores) if score == lowest])


def _candidates(views: Sequence[View], scores: Sequence[float]) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(
            endpoint_id=view.endpoint.id,
            cached_tokens=view.cached_tokens,
            num_requests=view.occupancy.num_requests,
            is_known=view.occupancy.is_known,
            score=score,
        )
        for view, score in zip(views, scores, strict=True)
    )
