"""A fleet in virtual time: the same as its parts by hand, and what failures do to requests."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections import Counter

import pytest

from kvoy_engine.core import EngineCore
from kvoy_engine.messages import AddRequest, ChoiceStart, SamplingParams
from kvoy_simulate.fleet import Fleet, run
from kvoy_simulate.fleet_testing import (
    CORE,
    STEP,
    Script,
    ask,
    column_bytes,
    engines,
    play,
    scene,
    steady,
)
from kvoy_simulate.outcome import Outcome, Status
from kvoy_simulate.runner import VirtualRunner
from kvoy_simulate.scenario import (
    EngineDies,
    EngineGroup,
    EngineHangs,
    EngineSlows,
    RouterRestarts,
    ScaleDown,
    ScaleUp,
    Scenario,
    TelemetryLost,
    Ways,
)
from kvoy_simulate.traffic import PromptSpec, SimRequest


def statuses(outcome: Outcome) -> Counter[Status]:
    return Counter(map(Status, outcome.requests.status))


def engines_of(outcome: Outcome) -> list[str]:
    return [outcome.engines[position].name for position in outcome.requests.engine]


def test_a_seed_gives_the_same_bytes_again_and_another_one_others() -> None:
    scenario = scene(steady(10, 3), engines(3), routers=2)

    first, second = play(scenario, seed=7), play(scenario, seed=7)
    other = play(scenario, seed=8)

    assert column_bytes(first) == column_bytes(second)
    assert column_bytes(first) != column_bytes(other)


def test_a_fleet_that_is_done_does_not_stay_beside_the_next_ones() -> None:
    for seed in range(4):
        run(scene(steady(10, 1), engines(2)), policy="kv-aware", seed=seed)

    assert sum(type(thing) is Fleet for thing in gc.get_objects()) <= 1


@pytest.mark.parametrize("routers", [1, 4])
def test_a_run_that_is_cut_short_ends_also_what_is_on_its_way_to_a_router(routers: int) -> None:
    way_s = Ways().client_s + Ways().pick_s
    requests = [ask(1.0 - way_s * i / 4) for i in (8, 6, 5, 4, 3, 2, 1)]
    scenario = dataclasses.replace(
        scene(requests, engines(2), duration_s=1.0, routers=routers), drain_s=0.0
    )

    outcome = play(scenario)

    assert statuses(outcome) == {Status.UNFINISHED: len(requests)}


def by_hand(requests: list[SimRequest]) -> list[tuple[float, float]]:
    """(first token, last token) of each request, from a plain loop around one core."""
    core = EngineCore(VirtualRunner(STEP, CORE), CORE)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    waiting = list(enumerate(requests))
    now_s = 0.0
    while waiting or core.has_work:
        if not core.has_work:
            now_s = max(now_s, waiting[0][1].arrival_s)
        while waiting and waiting[0][1].arrival_s <= now_s:
            number, request = waiting.pop(0)
            core.handle(
                AddRequest(
                    str(number),
                    range(request.num_prompt_tokens),
                    SamplingParams(request.max_tokens),
                    b"",
                    [ChoiceStart(0)],
                    arrival_s=request.arrival_s,
                    known_hashes=request.prompt_and_answer().hashes(CORE.block_size),
                ),
                now_s,
            )
        output = core.step(now_s)
        now_s = output.now_s
        for out in output.tokens:
            first.setdefault(out.request_id, now_s)
            last[out.request_id] = now_s
    return [(first[str(i)], last[str(i)]) for i in range(len(requests))]


def test_one_engine_does_what_its_core_does_when_stepped_by_hand() -> None:
    shared = PromptSpec(None, "document", 300)
    requests = [ask(0.0, tokens=700, output=5), ask(0.01, tokens=33, output=40)]
    requests += [
        SimRequest(0.2 + i / 7, shared.then(f"q{i}", 50 + i), 3 + i % 30, f"s{i}")
        for i in range(40)
    ]
    scenario = Scenario(
        engines=(engines(1),),
        workload=lambda seed: Script(requests),
        duration_s=10.0,
        ways=Ways(client_s=0.0, request_s=0.0, telemetry_s=0.0, pick_s=0.0),
    )

    columns = play(scenario).requests

    got = list(zip(columns.first_token_s, columns.end_s, strict=True))
    for mine, expected in zip(got, by_hand(requests), strict=True):
        assert mine == pytest.approx(expected)
    assert max(columns.cached_tokens) >= 288


def test_a_next_turn_finds_its_prompt_and_its_answer_in_the_cache() -> None:
    first = SimRequest(0.1, PromptSpec(None, "talk", 160), 32, "talk", answer="said")

    def next_turn(request: SimRequest, now_s: float) -> SimRequest | None:
        if request is not first:
            return None
        return SimRequest(now_s + 1, first.prompt_and_answer().then("more", 30), 5, "talk")

    scenario = Scenario(
        engines=(engines(3),), workload=lambda seed: Script([first], next_turn), duration_s=10.0
    )

    outcome = play(scenario)

    # The last token said has no KV yet, so the block that it ends is not whole.
    assert list(outcome.requests.cached_tokens) == [0, 176]
    assert list(outcome.requests.predicted_tokens) == [0, 128]
    assert len(set(outcome.requests.engine)) == 1


def test_streams_of_an_engine_that_dies_go_on_elsewhere() -> None:
    events = [EngineDies(at_s=3.0, engine="engine-0", restart_after_s=2.0)]

    outcome = play(scene(steady(8, 8, output=30), engines(3), events=events))

    columns = outcome.requests
    assert statuses(outcome) == {Status.OK: 64}
    assert all(tokens == 30 for tokens in columns.output_tokens)
    assert sum(columns.resumes) >= 1
    assert [series.name for series in outcome.engines].count("engine-0") == 2
    revived = len(outcome.engines) - 1
    assert outcome.engines[0].ended_s == 3.0
    assert revived in columns.engine, "the new process is found and used"


def test_without_another_engine_a_broken_stream_ends_with_an_error() -> None:
    events = [EngineDies(at_s=1.0, engine="engine-0")]

    outcome = play(scene([ask(0.1, output=60), ask(2.0)], engines(1), events=events))

    assert list(outcome.requests.status) == [Status.BROKEN, Status.REFUSED]
    assert 0 < outcome.requests.output_tokens[0] < 60


def test_requests_on_a_hanging_engine_go_elsewhere_within_seconds() -> None:
    events = [EngineHangs(at_s=2.0, engine="engine-0", for_s=20.0)]

    outcome = play(scene(steady(8, 8, output=30), engines(3), events=events))

    columns = outcome.requests
    latest_s = max(
        end_s - arrival_s for end_s, arrival_s in zip(columns.end_s, columns.arrival_s, strict=True)
    )
    assert statuses(outcome) == {Status.OK: 64}
    assert sum(columns.resumes) + sum(columns.retries) >= 1
    assert latest_s < 3.0 + 1.0 + 60 * STEP.base_s


def test_an_engine_that_slows_down_gets_less() -> None:
    events = [EngineSlows(at_s=0.0, engine="engine-0", factor=8.0)]

    outcome = play(scene(steady(12, 9), engines(2), events=events), seed=3)

    share = Counter(engines_of(outcome))
    assert share["engine-0"] < 0.5 * share["engine-1"]


def test_a_rolled_router_loses_nothing() -> None:
    events = [RouterRestarts(at_s=3.0, router=0)]

    outcome = play(scene(steady(8, 8, output=40), engines(2), events=events))

    assert statuses(outcome) == {Status.OK: 64}


def test_a_killed_router_cuts_its_streams_and_engines_forget_them() -> None:
    events = [RouterRestarts(at_s=3.0, router=0, is_killed=True, down_s=0.5)]

    outcome = play(scene(steady(8, 8, output=40), engines(2), events=events))

    ends = statuses(outcome)
    assert ends[Status.CUT] >= 1
    assert ends[Status.REFUSED] >= 1, "nobody was there for those that came meanwhile"
    assert ends[Status.OK] == 64 - ends[Status.CUT] - ends[Status.REFUSED]
    at_end = [series.running[-1] for series in outcome.engines]
    assert at_end == [0, 0]


def test_other_replicas_serve_while_one_is_away() -> None:
    events = [RouterRestarts(at_s=3.0, router=0, is_killed=True, down_s=3.0)]

    outcome = play(scene(steady(8, 8), engines(2), events=events, routers=3))

    columns = outcome.requests
    ends = statuses(outcome)
    assert set(ends) <= {Status.OK, Status.CUT}
    away = [r for r, at_s in zip(columns.router, columns.arrival_s, strict=True) if 3 < at_s < 5.9]
    assert 0 not in away


def test_requests_pass_while_telemetry_is_lost() -> None:
    events = [TelemetryLost(at_s=2.0, for_s=4.0)]

    outcome = play(scene(steady(8, 8), engines(3), events=events))

    assert statuses(outcome) == {Status.OK: 64}
    assert len({name for name in engines_of(outcome)[16:48]}) == 3, "none is left out for it"


def test_engines_that_go_finish_what_they_have_and_get_nothing_new() -> None:
    events = [ScaleDown(at_s=3.0, group="engine", count=2)]

    outcome = play(scene(steady(8, 8, output=30), engines(3), events=events))

    assert statuses(outcome) == {Status.OK: 64}
    gone = [series for series in outcome.engines if not math.isnan(series.ended_s)]
    assert sorted(series.name for series in gone) == ["engine-1", "engine-2"]
    late = [
        name
        for name, at_s in zip(engines_of(outcome), outcome.requests.arrival_s, strict=True)
        if at_s > 3.1
    ]
    assert set(late) == {"engine-0"}


def test_engines_that_come_are_used() -> None:
    events = [ScaleUp(at_s=2.0, group="engine", count=2, load_s=1.0)]

    outcome = play(scene(steady(16, 8), engines(1), events=events))

    assert set(engines_of(outcome)) == {"engine-0", "engine-1", "engine-2"}


def test_faster_engines_of_a_mixed_fleet_do_more() -> None:
    groups = (engines(1, "slow"), engines(1, "fast", speed=4.0))

    outcome = play(scene(steady(20, 8), *groups))

    share = Counter(engines_of(outcome))
    assert share["fast-0"] > 1.5 * share["slow-0"]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (EngineDies(at_s=1, engine="other-0"), "called GROUP-NUMBER"),
        (ScaleUp(at_s=1, group="other", count=1), "no group is called 'other'"),
        (RouterRestarts(at_s=1, router=1), r"router must be in 0 \.\. 0"),
        (EngineSlows(at_s=1, engine="engine-0", factor=0.0), "factor must be above 0"),
        (EngineHangs(at_s=-1, engine="engine-0", for_s=1), "at_s must be at least 0"),
    ],
)
def test_an_event_that_cannot_happen_is_refused_by_name(event: EngineDies, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scene([], engines(1), events=[event])


def test_groups_of_one_name_or_of_other_strides_are_refused() -> None:
    with pytest.raises(ValueError, match="group names must differ"):
        scene([], engines(1), engines(1))
    with pytest.raises(ValueError, match="count of x must be at least 0"):
        EngineGroup(name="x", count=-1, core=CORE)
