"""Workloads: the same for the same seed, at the rates and with the sharing that they promise."""

from __future__ import annotations

from collections import Counter
from itertools import islice, takewhile
from random import Random
from typing import Any

import pytest

from kvoy_simulate.arrivals import Arrivals
from kvoy_simulate.scenario_file import Mix, find_scenario, shipped_scenarios
from kvoy_simulate.sessions import Sessions
from kvoy_simulate.traffic import SimRequest, Workload
from kvoy_simulate.workloads import Bursts, Independent, SharedPrefix


def first(workload: Workload, count: int) -> list[SimRequest]:
    return list(islice(workload.start(), count))


def facts(request: SimRequest) -> tuple[Any, ...]:
    return request.arrival_s, request.prompt, request.max_tokens, request.session


@pytest.mark.parametrize("name", shipped_scenarios())
def test_a_shipped_workload_is_ordered_and_depends_on_its_seed_alone(name: str) -> None:
    workload = find_scenario(name).workload

    one, again = (list(map(facts, first(workload.build("w", 7), 40))) for _ in range(2))
    other = list(map(facts, first(workload.build("w", 8), 40)))

    assert one == again
    assert one != other
    assert [fact[0] for fact in one] == sorted(fact[0] for fact in one)


def test_arrivals_are_gentler_until_the_warm_up_is_over() -> None:
    arrivals = Arrivals(rate=60, warmup_rate=15, warmup_s=30)

    times = list(takewhile(lambda at_s: at_s < 60, arrivals.times(Random(1))))

    before = sum(at_s < 30 for at_s in times)
    assert before == pytest.approx(450, abs=4 * 450**0.5)
    assert len(times) - before == pytest.approx(1800, abs=4 * 1800**0.5)


def test_a_warm_up_rate_above_the_rate_changes_nothing() -> None:
    arrivals = Arrivals(rate=2, warmup_rate=15, warmup_s=10, spacing="even")

    assert list(islice(arrivals.times(Random(0)), 3)) == [0.5, 1.0, 1.5]


def test_shared_prefix_asks_each_prompt_equally_often_and_shares_within_groups() -> None:
    workload = SharedPrefix(
        arrivals=Arrivals(rate=10), groups=3, questions=2, prefix_tokens=640, question_tokens=128
    )

    requests = first(workload.build("w", 0), 60)

    prompts = Counter(request.prompt for request in requests)
    assert sorted(prompts.values()) == [10] * 6
    by_group: dict[str, set[tuple[bytes, ...]]] = {}
    for request in requests:
        by_group.setdefault(request.group, set()).add(tuple(request.prompt.hashes(64)[:10]))
    assert [len(prefixes) for prefixes in by_group.values()] == [1, 1, 1]
    assert len(set.union(*by_group.values())) == 3
    assert len({request.session for request in requests}) == 60


def test_independent_prompts_share_their_beginning_and_nothing_else() -> None:
    workload = Independent(arrivals=Arrivals(rate=1), prompt_tokens=1000, shared_tokens=256)

    one, other = (r.prompt.hashes(64) for r in first(workload.build("w", 0), 2))

    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other[4:])
    assert len(one) == 1000 // 64


def test_a_burst_is_one_prompt_many_times_within_a_moment() -> None:
    workload = Bursts(arrivals=Arrivals(rate=1, spacing="even"), size=4, within_s=0.1)

    requests = first(workload.build("w", 0), 8)

    assert [len({r.prompt for r in requests[i : i + 4]}) for i in (0, 4)] == [1, 1]
    assert requests[0].prompt != requests[4].prompt
    assert requests[3].arrival_s - requests[0].arrival_s <= 0.1


def test_bursts_that_overlap_stay_in_order() -> None:
    workload = Bursts(arrivals=Arrivals(rate=10), size=5, within_s=1.0)

    times = [request.arrival_s for request in first(workload.build("w", 0), 200)]

    assert times == sorted(times)


def test_a_turn_follows_its_answer_and_contains_it() -> None:
    chats = Sessions(users=2, turns=3, pause_s=5.0, start_tokens=100, turn_tokens=40)
    workload = chats.build("w", 0)
    first_turn = next(iter(workload.start()))

    second_turn = workload.on_finish(first_turn, 20.0)

    assert second_turn is not None
    assert second_turn.arrival_s >= 20.0
    assert second_turn.session == first_turn.session
    assert second_turn.num_prompt_tokens == 100 + first_turn.max_tokens + 40
    complete = first_turn.prompt_and_answer().hashes(16)
    assert second_turn.prompt.hashes(16)[: len(complete)] == complete


def test_a_user_begins_a_new_session_when_one_has_ended() -> None:
    workload = Sessions(users=1, turns=2).build("w", 0)
    request = next(iter(workload.start()))

    names = []
    for _ in range(6):
        names.append(request.session)
        following = workload.on_finish(request, 1.0)
        assert following is not None
        request = following

    assert names == ["w/s0", "w/s0", "w/s1", "w/s1", "w/s2", "w/s2"]


def test_sessions_that_arrive_by_themselves_end() -> None:
    workload = Sessions(arrivals=Arrivals(rate=1), turns=1).build("w", 0)

    assert workload.on_finish(next(iter(workload.start())), 1.0) is None


def test_a_session_ends_before_its_prompt_is_too_long() -> None:
    chats = Sessions(
        arrivals=Arrivals(rate=1), turns=50, start_tokens=100, turn_tokens=100, output_tokens=100,
        max_prompt_tokens=500,
    )  # fmt: skip
    workload = chats.build("w", 0)
    turns: list[SimRequest] = []
    request: SimRequest | None = next(iter(workload.start()))
    while request is not None:
        turns.append(request)
        request = workload.on_finish(request, 1.0)

    assert [turn.num_prompt_tokens for turn in turns] == [100, 300, 500]


def test_what_a_session_says_does_not_depend_on_when_others_are_answered() -> None:
    def sizes(order: list[int]) -> list[tuple[int, int]]:
        workload = Sessions(users=2, turns=(4, 9), turn_tokens=(1, 999)).build("w", 0)
        requests = sorted(workload.start(), key=lambda request: request.session)
        for index in order:
            following = workload.on_finish(requests[index], 9.0)
            assert following is not None
            requests[index] = following
        return [(request.num_prompt_tokens, request.max_tokens) for request in requests]

    assert sizes([0, 0, 1, 1]) == sizes([1, 0, 1, 0])


def test_applications_share_their_beginning() -> None:
    chats = Sessions(users=30, applications=2, shared_tokens=640)

    beginnings = {tuple(r.prompt.hashes(64)[:10]) for r in first(chats.build("w", 0), 30)}

    assert len(beginnings) == 2


def test_a_mixture_is_ordered_and_each_part_goes_on_with_its_own_sessions() -> None:
    mixture = Mix(
        parts={
            "batch": Independent(arrivals=Arrivals(rate=5), priority=10),
            "chat": Sessions(arrivals=Arrivals(rate=5), turns=2, tenant="people"),
        }
    )
    workload = mixture.build("w", 0)

    requests = first(workload, 40)
    following = [workload.on_finish(request, 100.0) for request in requests]

    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert {(r.tenant, r.priority) for r in requests} == {("batch", 10), ("people", 0)}
    for request, later in zip(requests, following, strict=True):
        assert (later is not None) == (request.tenant == "people")


@pytest.mark.parametrize("name", ["shared-prefix", "no-reuse", "bursts", "trace"])
def test_at_another_rate_so_many_more_requests_come(name: str) -> None:
    workload = find_scenario(name).workload

    def requests_until(rate: float) -> int:
        made = workload.at_rate(rate).build("w", 3).start()
        return len(list(takewhile(lambda request: request.arrival_s < 100, made)))

    assert requests_until(12.0) / requests_until(3.0) == pytest.approx(4.0, rel=0.25)


def test_a_closed_loop_at_a_rate_has_so_many_users() -> None:
    workload = find_scenario("agents").workload.at_rate(5.0)

    assert len(list(workload.build("w", 0).start())) == 5
