"""Workloads and schedules: fixed by their seed, with the published ratios."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from kvoy_cli.bench.schedule import even_offsets, poisson_offsets
from kvoy_cli.bench.shared_prefix_report import Sizes
from kvoy_cli.bench.workloads import (
    SharedPrefixShape,
    chat_script,
    shared_prefix_prompts,
    short_prompts,
    shuffled_forever,
)


def test_poisson_arrivals_are_fixed_by_their_seed() -> None:
    assert poisson_offsets(5.0, 10.0, seed=3) == poisson_offsets(5.0, 10.0, seed=3)
    assert poisson_offsets(5.0, 10.0, seed=3) != poisson_offsets(5.0, 10.0, seed=4)


def test_poisson_arrivals_keep_their_rate_and_their_spread() -> None:
    offsets = poisson_offsets(50.0, 400.0, seed=1)
    gaps = [after - before for before, after in pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)

    assert offsets == sorted(offsets)
    assert offsets[0] >= 0.0
    assert offsets[-1] < 400.0
    assert len(offsets) == pytest.approx(20_000, rel=0.03)
    # An exponential gap deviates by as much as its mean.
    assert variance**0.5 == pytest.approx(mean, rel=0.05)


def test_even_arrivals_keep_one_pace() -> None:
    assert even_offsets(4.0, 1.0) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_schedule_without_a_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate above 0"):
        poisson_offsets(rate, 1.0, seed=0)


def test_the_shared_prefix_workload_has_the_published_ratios() -> None:
    sizes = Sizes()
    shape = sizes.shape

    assert shape.prefix_tokens / shape.output_tokens == 6.0
    assert shape.question_tokens / shape.output_tokens == pytest.approx(1.2)
    assert (shape.num_groups, shape.questions_per_group) == (150, 5)
    all_kv = sizes.num_engines * sizes.blocks_per_engine * 16
    assert shape.working_set_tokens / all_kv == pytest.approx(0.73, abs=0.002)
    assert sizes.working_set_in_engines == pytest.approx(5.9, abs=0.1)


def test_questions_of_a_group_share_their_prefix_and_nothing_more() -> None:
    shape = SharedPrefixShape(3, 2, 32, 16, 4)
    prompts = shared_prefix_prompts(shape, seed=1)

    assert len(prompts) == 6
    assert all(len(prompt) == 48 for prompt in prompts)
    assert prompts[0][:32] == prompts[1][:32]
    assert prompts[0][32:] != prompts[1][32:]
    assert prompts[1][:16] != prompts[2][:16]
    assert prompts == shared_prefix_prompts(shape, seed=1)
    assert prompts != shared_prefix_prompts(shape, seed=2)


def test_every_pass_draws_each_prompt_once_in_another_order() -> None:
    prompts = [[index] for index in range(20)]

    first, second = (list(islice(shuffled, 20)) for shuffled in [shuffled_forever(prompts, 1)] * 2)

    assert sorted(first) == sorted(second) == prompts
    assert first != second


def test_prompts_without_reuse_have_no_equal_first_block() -> None:
    prompts = short_prompts(500, 32, seed=7)

    assert len({tuple(prompt[:16]) for prompt in prompts}) == 500
    assert all(32 <= token < 256 for prompt in prompts for token in prompt)


def test_chats_of_different_seeds_differ_from_the_system_message_on() -> None:
    one, other = chat_script(10, 20, seed=1), chat_script(10, 20, seed=2)

    assert len(one.turns) == 10
    assert one == chat_script(10, 20, seed=1)
    assert one.system.split()[:6] != other.system.split()[:6]
