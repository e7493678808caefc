"""Whether two runs gave the same result: the one comparison behind every claim of equality.

Batching, prefix reuse, preemption, transfer, continuation and parallelism change speed, not the
result. What "the same" means depends on the numbers' width: in float64 the very same tokens; in
float32 the same up to the first position where the reference itself is undecided, and logits within
a tolerance; in half precision a share of equal first choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

UNDECIDED_MARGIN = 1e-3
"""float32: with the two best logits closer than this, either token is right."""
LOGIT_TOLERANCE = 1e-3
"""float32: largest difference of teacher-forced logits."""
MIN_AGREEMENT = 0.995
"""float16 weights: least share of equal first choices, teacher-forced."""


class Exactness(StrEnum):
    EXACT = "exact"
    """float64: token for token."""
    MARGIN = "margin"
    """float32: token for token, up to where the reference is undecided."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A greedy run that is held to be right: uncached, alone."""

    token_ids: Sequence[int]
    margins: Sequence[float]
    """Per token: best logit less second best."""


@dataclass(frozen=True, slots=True)
class Verdict:
    is_equal: bool
    num_compared: int
    """Tokens compared before the end or before the reference was undecided."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LogitComparison:
    max_difference: float
    top1_agreement: float
    """Share of positions with the same most likely token."""

    @property
    def is_float32_equal(self) -> bool:
        return self.max_difference <= LOGIT_TOLERANCE

    @property
    def is_half_equal(self) -> bool:
        return self.top1_agreement >= MIN_AGREEMENT


def compare_tokens(reference: Reference, token_ids: Sequence[int], exactness: Exactness) -> Verdict:
    """Compare a run's tokens with the reference's.

    A run may be shorter where both ended by the same rule; a missing token counts as a difference.
    """
    for position, expected in enumerate(reference.token_ids):
        got = token_ids[position] if position < len(token_ids) else None
        if got == expected:
            continue
        margin = reference.margins[position]
        if exactness is Exactness.MARGIN and got is not None and margin < UNDECIDED_MARGIN:
            return Verdict(True, position, f"undecided at {position} (margin {margin:.1e})")
        return Verdict(
            False, position, f"token {position} is {got}, expected {expected} (margin {margin:.1e})"
        )
    if len(token_ids) > len(reference.token_ids):
        return Verdict(False, len(reference.token_ids), "more tokens than the reference")
    return Verdict(True, len(reference.token_ids))


def compare_logits(reference: torch.Tensor, logits: torch.Tensor) -> LogitComparison:
    """Compare teacher-forced logits, both (T, vocab_size), T at least 1."""
    difference = (reference.double() - logits.double()).abs().max()
    agreement = (reference.argmax(dim=-1) == logits.argmax(dim=-1)).double().mean()
    return LogitComparison(float(difference), float(agreement))


def margins(logits: torch.Tensor) -> list[float]:
    """(T, vocab_size) logits to the T distances between best and second best."""
    best = logits.double().topk(2, dim=-1).values
    distances: list[float] = (best[:, 0] - best[:, 1]).tolist()
    return distances
