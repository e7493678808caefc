"""Logits to tokens, for all rows of a step at once.

A row's result depends on its own logits, parameters and random number alone. Filters (top-k, top-p,
min-p) are thresholds: every token at least as likely as the last one kept is kept, so ties need no
order. The token is then found by inverse CDF over the kept tokens in the order of their ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from kvoy_engine.batch import Row, RowOutput
from kvoy_engine.logits_edits import edit_logits, has_edits
from kvoy_engine.messages import SamplingParams, TokenLogprob
from kvoy_engine.randomness import uniform

NOT_FINITE = "the model's output for this sequence is not finite"
NOTHING_ALLOWED = "every token is banned for this sequence"
LEAST_TEMPERATURE = 1e-6
"""Below it the most likely token is certain; float32 would lose the quotient, and then the
temperature itself."""


class Greedy(Protocol):
    """(S, vocab_size) logits to (S,) most likely ids and (S,) whether all of a row is finite."""

    def __call__(self, logits: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]: ...


def torch_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # One sum finds what is not finite: neither NaN nor infinity can be added away.
    return logits.argmax(dim=-1), torch.isfinite(logits.sum(dim=-1))


def sample(
    logits: torch.Tensor, rows: Sequence[Row], greedy: Greedy = torch_greedy
) -> list[RowOutput]:
    """Sample one token a row. `logits` is (S, vocab_size) and may be changed.

    A row whose logits are not finite, or for which no token is allowed, gets an error and no token.
    """
    best, finite = greedy(logits)
    errors = [None if is_finite else NOT_FINITE for is_finite in finite.tolist()]
    reporting = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    raw = torch.log_softmax(logits[reporting], dim=-1) if reporting else None

    edited = [i for i, row in enumerate(rows) if errors[i] is None and has_edits(row)]
    for i in edited:
        edit_logits(logits[i], rows[i])
    token_ids = best.tolist()
    for i in edited:
        value, index = logits[i].max(dim=-1)
        token_ids[i] = int(index)
        if not math.isfinite(value):
            errors[i] = NOTHING_ALLOWED if value == -math.inf else NOT_FINITE

    drawn = [
        i
        for i, row in enumerate(rows)
        if errors[i] is None and row.params.temperature >= LEAST_TEMPERATURE
    ]
    if drawn:
        subset = logits if len(drawn) == len(rows) else logits[drawn]
        for i, token_id in zip(drawn, _draw(subset, [rows[i] for i in drawn]), strict=True):
            token_ids[i] = token_id

    logprobs: dict[int, TokenLogprob] = {}
    if raw is not None:
        entries = logprob_entries(
            raw,
            [token_ids[i] for i in reporting],
            [rows[i].params.logprobs or 0 for i in reporting],
        )
        logprobs = dict(zip(reporting, entries, strict=True))
    return [
        RowOutput(error=error)
        if error is not None
        else RowOutput(token_id=token_id, logprob=logprobs.get(i))
        for i, (token_id, error) in enumerate(zip(token_ids, errors, strict=True))
    ]


def logprob_entries(
    logprobs: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Report (S, vocab_size) log-probabilities: of one token a row, and each row's `num_top`
    best."""
    index = torch.tensor(token_ids, device=logprobs.device).unsqueeze(1)
    own = logprobs.gather(1, index).squeeze(1).tolist()
    most = max(num_top, default=0)
    tops: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    if most:
        values, ids = (part.tolist() for part in logprobs.topk(most, dim=-1))
        tops = [
            list(zip(ids[i][:count], values[i][:count], strict=True))
            for i, count in enumerate(num_top)
        ]
    return [
        TokenLogprob(token_id=token_id, logprob=logprob, top=top)
        for token_id, logprob, top in zip(token_ids, own, tops, strict=True)
    ]


def _draw(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Inverse CDF over each row's filtered distribution."""
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=logits.dtype)
    scaled = logits - logits.amax(dim=-1, keepdim=True)  # no temperature, however small, overflows
    scaled /= temperatures.to(logits.device).unsqueeze(1)
    for i, row in enumerate(rows):
        if (limit := _threshold(scaled[i], row.params)) is not None:
            scaled[i].masked_fill_(scaled[i] < limit, -math.inf)
    weights = scaled.exp_()
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    numbers = [uniform(row.params.seed, row.choice, len(row.output_ids)) for row in rows]
    target = torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(1) * total
    # The product may round up to the total, past the last token of any weight.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    token_ids: list[int] = torch.searchsorted(cumulative, target, right=True).squeeze(1).tolist()
    return token_ids


def _threshold(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """The least of one row's (vocab_size,) scaled logits that is kept; None keeps all.

    The highest of `scaled` is 0. Top-p is of the mass that top-k leaves.
    """
    limit: torch.Tensor | None = None
    if 0 < params.top_k < scaled.shape[0]:
        limit = scaled.topk(params.top_k).values[-1]
    if params.top_p < 1.0:
        kept = scaled if limit is None else scaled[scaled >= limit]
        limit = _nucleus_limit(kept, params.top_p)
    if params.min_p > 0.0:
        least = scaled.new_tensor(math.log(params.min_p))
        limit = least if limit is None else torch.maximum(limit, least)
    return limit


def _nucleus_limit(kept: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least scaled logit of the smallest set of best tokens that has `top_p` of the mass."""
    weights = kept.exp()
    total = weights.sum(dtype=torch.float64)
    # Tokens below it have together less than 1 - top_p: none is in the set, none need be sorted.
    # The best one always stays: no mean is greater.
    negligible = (1.0 - top_p) * total / len(kept)
    candidates = kept[weights >= negligible]
    ordered = candidates.sort(descending=True).values
    mass = ordered.exp().cumsum(0, dtype=torch.float64)
    last = torch.searchsorted(mass, top_p * total).clamp_(max=len(ordered) - 1)
    return ordered[last]
