"""The mixed requests of the equality benchmark, and the comparison of two runs of them. Pure.

Two greedy runs in floating point may part ways where the reference's two best logits are closer
than rounding; after that their contexts differ and nothing can be compared. So a pair of outputs is
compared up to its first difference, and that one position decides.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoy_cli.bench.workloads import random_ids

MARGIN = 1e-3
"""Two best logits that are closer may be swapped by float32's rounding."""


class Fate(enum.StrEnum):
    """What happens to a request in the mixed run."""

    WHOLE = "whole"
    ABORTED = "aborted"
    """Its client goes away after some tokens: those must be the reference's first ones."""
    RESUMED = "resumed"
    """It is cut after some tokens and continued on the second engine."""


@dataclass(frozen=True, slots=True)
class Case:
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    fate: Fate
    cut_after: int
    """Tokens after which an aborted or resumed one is cut."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class CaseSizes:
    count: int = 200
    num_prefixes: int = 12
    max_prefix: int = 160
    max_tail: int = 60
    min_output: int = 8
    max_output: int = 120
    """Well beyond the room that an engine leaves for growth when it admits a sequence: else a small
    pool would queue requests and never preempt one."""

    @property
    def longest(self) -> int:
        return self.max_prefix + self.max_tail + self.max_output


def make_cases(sizes: CaseSizes, seed: int) -> list[Case]:
    """Prefixes are shared by about `count / num_prefixes` requests; half of all requests sample."""
    rng = random.Random(f"equality-{seed}")
    prefixes = [
        random_ids(rng, rng.randrange(1, sizes.max_prefix + 1)) for _ in range(sizes.num_prefixes)
    ]
    return [_make_case(rng, rng.choice(prefixes), sizes, index) for index in range(sizes.count)]


def _make_case(rng: random.Random, prefix: list[int], sizes: CaseSizes, index: int) -> Case:
    max_tokens = rng.randrange(sizes.min_output, sizes.max_output + 1)
    samples = index % 2 == 1
    return Case(
        prompt_ids=tuple(prefix + random_ids(rng, rng.randrange(1, sizes.max_tail + 1))),
        max_tokens=max_tokens,
        temperature=rng.choice((0.7, 1.0)) if samples else 0.0,
        top_p=rng.choice((0.9, 1.0)) if samples else 1.0,
        seed=rng.getrandbits(32),
        fate=rng.choices(tuple(Fate), weights=(70, 15, 15))[0],
        cut_after=rng.randrange(1, max_tokens),
    )


@dataclass(frozen=True, slots=True)
class Generation:
    """Token ids of one request, and how far apart the two best logits were at each position."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a mixed run compares with its reference, over all requests of a kind."""

    num_requests: int
    num_positions: int
    """Compared: up to each request's first difference, that one included."""
    num_different: int
    num_unexplained: int
    """Differences at positions where the reference was sure, and outputs of another length."""

    @property
    def share(self) -> float:
        """Of the positions with equal context, how many got the same token."""
        if not self.num_positions:
            return math.nan
        return 1 - self.num_different / self.num_positions


def margins_of(top_logprobs: Iterable[Mapping[str, float]]) -> tuple[float, ...]:
    """Difference of the two best logprobs per position; infinite where less than two are named."""
    margins = []
    for entry in top_logprobs:
        best = sorted(entry.values(), reverse=True)[:2]
        margins.append(best[0] - best[1] if len(best) == 2 else math.inf)
    return tuple(margins)


def compare(
    cases: Sequence[Case], reference: Sequence[Generation], mixed: Sequence[Generation]
) -> Agreement:
    """Cases that were aborted need only the reference's first tokens; the others all of them."""
    positions = different = unexplained = 0
    for case, expected, actual in zip(cases, reference, mixed, strict=True):
        at = first_difference(expected.token_ids, actual.token_ids)
        positions += at
        if at < min(len(expected.token_ids), len(actual.token_ids)):
            positions += 1
            different += 1
            margin = expected.margins[at] if at < len(expected.margins) else math.inf
            unexplained += margin >= MARGIN
        elif case.fate is not Fate.ABORTED and len(actual.token_ids) != len(expected.token_ids):
            different += 1
            unexplained += 1
    return Agreement(len(cases), positions, different, unexplained)


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return index
    return min(len(expected), len(actual))
