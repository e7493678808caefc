"""How outputs are compared, and what the mixed requests are."""

from __future__ import annotations

import math

from kvoy_cli.bench.equality_cases import (
    Case,
    CaseSizes,
    Fate,
    Generation,
    compare,
    first_difference,
    make_cases,
    margins_of,
)
from kvoy_cli.bench.memory_report import (
    Fit,
    ModelShape,
    blocks_needed,
    most_at_once,
    users_that_fit,
)


def _case(fate: Fate = Fate.WHOLE) -> Case:
    return Case((1, 2), 4, 0.0, 1.0, 0, fate, 2)


def test_equal_outputs_agree_at_every_position() -> None:
    agreement = compare([_case()], [Generation((5, 6, 7, 8))], [Generation((5, 6, 7, 8))])

    assert (agreement.num_positions, agreement.num_different) == (4, 0)
    assert agreement.share == 1.0


def test_only_the_first_difference_counts_and_what_follows_is_not_compared() -> None:
    reference = Generation((5, 6, 7, 8), (1.0, 1e-4, 1.0, 1.0))

    agreement = compare([_case()], [reference], [Generation((5, 9, 1, 2))])

    assert (agreement.num_positions, agreement.num_different) == (2, 1)
    assert agreement.num_unexplained == 0
    assert agreement.share == 0.5


def test_a_difference_where_the_reference_was_sure_is_unexplained() -> None:
    reference = Generation((5, 6), (1.0, 0.5))

    assert compare([_case()], [reference], [Generation((5, 9))]).num_unexplained == 1
    assert compare([_case()], [Generation((5, 6))], [Generation((5, 9))]).num_unexplained == 1


def test_an_aborted_request_needs_only_the_first_tokens() -> None:
    reference, part = Generation((5, 6, 7, 8)), Generation((5, 6))

    assert compare([_case(Fate.ABORTED)], [reference], [part]).num_different == 0
    assert compare([_case(Fate.RESUMED)], [reference], [part]).num_unexplained == 1
    assert compare([_case()], [reference], [part]).num_unexplained == 1


def test_a_margin_is_the_distance_of_the_two_best_logprobs() -> None:
    margins = margins_of([{"a": -1.0, "b": -0.25, "c": -3.0}, {"a": -1.0}])

    assert margins == (0.75, math.inf)


def test_the_common_beginning_ends_with_the_shorter_output() -> None:
    assert first_difference((1, 2, 3), (1, 2)) == 2
    assert first_difference((1, 2), (3, 2)) == 0


def test_the_mix_has_shared_prefixes_both_samplings_and_all_fates() -> None:
    sizes = CaseSizes()
    cases = make_cases(sizes, seed=1)

    assert len(cases) == 200
    assert cases == make_cases(sizes, seed=1)
    assert {case.fate for case in cases} == set(Fate)
    assert sum(case.is_greedy for case in cases) == 100
    assert len({case.prompt_ids[0] for case in cases}) <= sizes.num_prefixes
    assert all(1 <= case.cut_after < case.max_tokens for case in cases)
    assert max(len(case.prompt_ids) + case.max_tokens for case in cases) <= sizes.longest


def test_bytes_of_a_block_follow_from_the_shape_of_the_model() -> None:
    shape = ModelShape(num_layers=30, num_kv_heads=3, head_dim=64)

    assert shape.block_bytes(16, 2) == 368_640
    assert shape.element_bytes(737_280, 16) == 4
    assert shape.element_bytes(737_281, 16) == 0


def test_users_fit_by_whole_blocks() -> None:
    assert blocks_needed(257, 16) == 17
    assert users_that_fit(96, 16, 256) == 6
    assert users_that_fit(96, 16, 257) == 5


def test_a_fit_is_as_predicted_when_one_more_user_does_not_run_undisturbed() -> None:
    assert Fit(6, 6, 16, ran_at_once=6, num_preemptions=0).is_as_predicted
    assert Fit(7, 6, 16, ran_at_once=6, num_preemptions=0).is_as_predicted
    assert Fit(7, 6, 16, ran_at_once=7, num_preemptions=2).is_as_predicted
    assert not Fit(6, 6, 16, ran_at_once=5, num_preemptions=0).is_as_predicted
    assert not Fit(7, 6, 16, ran_at_once=7, num_preemptions=0).is_as_predicted


def test_the_most_spans_at_once_share_a_moment() -> None:
    assert most_at_once([(0.0, 2.0), (1.0, 3.0), (2.5, 4.0)]) == 2
    assert most_at_once([]) == 0
