"""Changes to one row's logits before sampling: penalties, bias, and ids that must not be
sampled."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvoy_engine.batch import Row
from kvoy_engine.messages import SamplingParams


def has_edits(row: Row) -> bool:
    """Whether `edit_logits` would change anything for this row now."""
    params = row.params
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.banned_token_ids
        or _must_go_on(row, params)
    )


def edit_logits(logits: torch.Tensor, row: Row) -> None:
    """Change one row's (vocab_size,) logits in place.

    Penalties act on what the model said, then the bias; bans come last, so that nothing lifts them.
    """
    params = row.params
    if params.repetition_penalty != 1.0:
        _penalise_repetition(logits, row, params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_ids:
        ids, counts = np.unique(np.asarray(row.output_ids, dtype=np.int64), return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        logits[_index(ids, logits)] -= torch.from_numpy(penalty).to(logits)
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        bias = np.fromiter(params.logit_bias.values(), dtype=np.float64)
        logits[_index(ids, logits)] += torch.from_numpy(bias).to(logits)
    banned = params.banned_token_ids
    if _must_go_on(row, params):
        banned = banned + params.stop_token_ids
    if banned:
        logits[_index(np.array(banned, dtype=np.int64), logits)] = -math.inf


def _penalise_repetition(logits: torch.Tensor, row: Row, penalty: float) -> None:
    seen = np.unique(np.array([*row.prompt_ids, *row.output_ids], dtype=np.int64))
    index = _index(seen, logits)
    values = logits[index]
    logits[index] = torch.where(values > 0, values / penalty, values * penalty)


def _must_go_on(row: Row, params: SamplingParams) -> bool:
    return bool(params.stop_token_ids) and len(row.output_ids) < params.min_tokens


def _index(
    ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]], logits: torch.Tensor
) -> torch.Tensor:
    return torch.from_numpy(ids).to(logits.device)
