"""What the comparator calls equal, and what it does not."""

from __future__ import annotations

import pytest
import torch

from kvoy_engine.comparator import (
    Exactness,
    Reference,
    compare_logits,
    compare_tokens,
    margins,
)

REFERENCE = Reference(token_ids=(5, 6, 7, 8), margins=(1.0, 0.5, 0.0005, 2.0))


@pytest.mark.parametrize(
    ("token_ids", "in_float64", "in_float32"),
    [
        ((5, 6, 7, 8), True, True),
        ((5, 6, 9, 1), False, True),
        ((5, 9, 7, 8), False, False),
        ((5, 6, 7), False, False),
        ((5, 6), False, False),
        ((5, 6, 7, 8, 9), False, False),
    ],
)
def test_tokens_may_differ_only_in_float32_and_where_the_reference_is_undecided(
    token_ids: tuple[int, ...], in_float64: bool, in_float32: bool
) -> None:
    assert compare_tokens(REFERENCE, token_ids, Exactness.EXACT).is_equal is in_float64
    assert compare_tokens(REFERENCE, token_ids, Exactness.MARGIN).is_equal is in_float32


def test_a_difference_is_located() -> None:
    verdict = compare_tokens(REFERENCE, (5, 9, 7, 8), Exactness.EXACT)

    assert verdict.reason == "token 1 is 9, expected 6 (margin 5.0e-01)"


def test_logits_are_compared_by_value_and_by_first_choice() -> None:
    reference = torch.tensor([[0.0, 1.0], [3.0, 2.9995]])
    other = torch.tensor([[0.0, 1.0005], [2.9995, 3.0]])

    comparison = compare_logits(reference, other)

    assert comparison.max_difference == pytest.approx(0.0005, rel=1e-3)
    assert comparison.top1_agreement == 0.5
    assert comparison.is_float32_equal
    assert not comparison.is_half_equal
    assert margins(reference) == pytest.approx([1.0, 0.0005], rel=1e-3)
