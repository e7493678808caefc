"""Prompts as chains of named pieces: what is equal at the beginning hashes equal, and no more."""

from __future__ import annotations

import pytest

from kvoy_simulate.traffic import PromptSpec, SimRequest


def test_prompts_share_hashes_as_far_as_their_pieces_agree() -> None:
    short = PromptSpec.of(("prefix", 100), ("question", 50))
    long = PromptSpec.of(("prefix", 120), ("other", 50))

    assert short.hashes(20)[:5] == long.hashes(20)[:5]
    assert not set(short.hashes(20)[5:]) & set(long.hashes(20)[5:])


def test_a_hash_stands_for_a_prefix_whatever_the_stride() -> None:
    prompt = PromptSpec.of(("a", 130), ("b", 7), ("c", 200))

    blocks = prompt.hashes(16)

    assert prompt.hashes(64) == blocks[3::4]
    assert len(blocks) == 337 // 16
    assert len(set(blocks)) == len(blocks)


def test_the_same_piece_after_another_beginning_hashes_differently() -> None:
    first = PromptSpec.of(("a", 64), ("question", 64))
    second = PromptSpec.of(("b", 64), ("question", 64))

    assert not set(first.hashes(64)) & set(second.hashes(64))


def test_a_prompt_without_a_full_stride_has_no_hash() -> None:
    assert PromptSpec.of(("a", 63)).hashes(64) == []


def test_pieces_that_end_within_a_stride_are_part_of_the_next_hash() -> None:
    one = PromptSpec.of(("a", 40), ("b", 40))
    other = PromptSpec.of(("a", 40), ("c", 40))

    assert one.hashes(64) != other.hashes(64)


def test_equal_chains_are_equal_and_hash_alike() -> None:
    one, other = PromptSpec.of(("a", 5), ("b", 6)), PromptSpec(None, "a", 5).then("b", 6)

    assert one == other
    assert hash(one) == hash(other)
    assert one != PromptSpec.of(("a", 5), ("b", 7))


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_piece_without_tokens_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        PromptSpec(None, "a", tokens)


def test_a_later_turn_begins_with_the_prompt_and_the_answer_before_it() -> None:
    turn = SimRequest(0.0, PromptSpec(None, "chat", 100), 50, session="s", answer="a0")

    complete = turn.prompt_and_answer()
    following = complete.then("t1", 30)

    assert complete.num_tokens == 150
    assert following.hashes(16)[: 150 // 16] == complete.hashes(16)
