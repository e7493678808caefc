"""When a group of engine processes is whole, and when it is broken. Pure."""

from __future__ import annotations

from kvoy_engine.group import Group, Refusal, Verdict

SETTINGS = {"--model": "m", "--max-model-len": "4096"}


def group(nnodes: int = 3) -> Group:
    return Group(nnodes, SETTINGS)


def test_a_group_is_whole_once_every_other_rank_has_joined() -> None:
    state = group()

    state.on_joined(2)
    half = state.is_complete
    state.on_joined(1)

    assert not half
    assert state.is_complete
    assert state.missing == []


def test_a_rank_that_is_lost_before_the_group_was_whole_may_come_again() -> None:
    state = group()
    state.on_joined(1)

    state.on_lost(1, "gone")

    assert state.failure is None
    assert state.missing == [1, 2]
    assert state.refuse(1, SETTINGS) is None


def test_a_rank_that_is_lost_later_breaks_the_group_for_good() -> None:
    state = group(2)
    state.on_joined(1)

    state.on_lost(1, "the connection has ended")

    assert state.failure == "rank 1 of the group is lost: the connection has ended"
    assert not state.is_complete
    verdict = state.refuse(1, SETTINGS)
    assert verdict is not None
    assert verdict.refusal is Refusal.FOR_NOW


def test_a_rank_that_is_taken_must_wait() -> None:
    state = group()
    state.on_joined(1)

    assert state.refuse(1, SETTINGS) == Verdict(Refusal.FOR_NOW, "rank 1 has joined already")


def test_ranks_beyond_the_group_are_refused_for_good() -> None:
    for rank in (-1, 0, 3):
        verdict = group().refuse(rank, SETTINGS)

        assert verdict is not None
        assert verdict.refusal is Refusal.FOR_GOOD


def test_other_settings_are_refused_by_the_name_of_the_flag() -> None:
    verdict = group().refuse(1, SETTINGS | {"--max-model-len": "8192"})

    assert verdict == Verdict(
        Refusal.FOR_GOOD, "--max-model-len is 4096 at rank 0 and 8192 at the joining rank"
    )
