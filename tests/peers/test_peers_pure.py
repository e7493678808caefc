"""What the comparison makes of its measurements, without measuring anything."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from kvoy_cli.bench.outcome import Outcome
from kvoy_contract.openai import parse_chat
from kvoy_peers.catalogue import PEERS
from kvoy_peers.config import PeersConfig
from kvoy_peers.environment import Requirements, parse_pins
from kvoy_peers.figures import (
    Bounds,
    EngineCounters,
    Placement,
    RequestCost,
    RouteCosts,
    StreamCost,
    TurnCost,
    hit_rate_of,
    parse_counters,
    request_cost,
    spread_of,
    stream_cost,
)
from kvoy_peers.goals import cost_goals, placement_goals
from kvoy_peers.names import DIRECT, ENVOY, KVOY, RELAY, VLLM_ROUTER
from kvoy_peers.peer import Peer, Place
from kvoy_peers.report import Row, build_report
from kvoy_peers.traffic import ChatUsers, Conversation, Groups, conversations, drawn

METRICS = """\
# HELP kvoy_engine_requests_total Requests by outcome.
kvoy_engine_requests_total{endpoint="chat",outcome="success"} 7.0
kvoy_engine_requests_total{endpoint="chat",outcome="aborted"} 2.0
kvoy_engine_requests_total{endpoint="completions",outcome="success"} 40.0
kvoy_engine_prompt_tokens_total 1000.0
kvoy_engine_prompt_tokens_created 1.7e+09
kvoy_engine_cached_tokens_total 250.0
"""
PLACE = Place(Path("/bin"), Path("/folder"), 1, (2,), (11, 12), "bench", Path("/tokenizer"))


def placement(spread: float, hit_rate: float) -> Placement:
    return Placement(0.1, 0.2, 100.0, 5.0, spread, hit_rate, 10, 0)


def costs(chunk: float, request: float, turn_ms: float, events_per_read: float = 1.0) -> RouteCosts:
    cost = RequestCost(100.0, request, turn_ms, 2 * turn_ms, 0)
    return RouteCosts(
        streams=[StreamCost(chunk, events_per_read, 0)],
        requests={32: [cost]},
        turns={32: [TurnCost(cost, cost, math.nan)]},
        resident_mb=[50.0],
    )


def outcome(arrivals: list[float], error: str | None = None) -> Outcome:
    return Outcome(0.0, 0.0, arrivals[-1] if arrivals else 0.0, 200, error, arrivals=arrivals)


def test_counters_are_those_of_chats_and_of_whole_engines() -> None:
    counters = parse_counters(METRICS)

    assert counters == EngineCounters(9.0, 1000.0, 250.0)
    assert counters.since(EngineCounters(4.0, 600.0, 50.0)) == EngineCounters(5.0, 400.0, 200.0)


def test_spread_is_greatest_over_mean_and_hit_rate_is_over_all_engines() -> None:
    assert spread_of([10, 10, 40, 20]) == 2.0
    assert math.isnan(spread_of([0, 0]))
    assert hit_rate_of([EngineCounters(1, 100, 50), EngineCounters(1, 300, 50)]) == 0.25


def test_a_request_is_good_inside_both_bounds_and_never_when_it_failed() -> None:
    bounds = Bounds(ttft_s=1.0, tpot_s=0.125)

    assert bounds.are_kept_by(outcome([0.75, 0.875, 1.0]))
    assert not bounds.are_kept_by(outcome([1.1, 1.2]))
    assert not bounds.are_kept_by(outcome([0.5, 1.5]))
    assert not bounds.are_kept_by(outcome([0.5], error="broken"))
    assert not bounds.are_kept_by(outcome([]))


def test_what_failed_is_counted_and_costs_nothing() -> None:
    outcomes = [outcome([0.5]), outcome([0.25]), outcome([], error="refused")]

    cost = request_cost(outcomes, seconds=2.0, cpu_s=0.001)

    assert cost.p99_ms == pytest.approx(497.5)
    assert replace(cost, p99_ms=0.0) == RequestCost(1.0, 500.0, 375.0, 0.0, 1)
    assert cost.requests_per_core_s == 2000.0
    assert math.isnan(request_cost([], 1.0, 1.0).cpu_us)


def test_chunks_share_the_cpu_of_their_run() -> None:
    streamed = outcome([0.1, 0.2, 0.3, 0.4])
    streamed.num_reads = 2

    cost = stream_cost([streamed], cpu_s=0.0001)

    assert cost.cpu_us == pytest.approx(25.0)
    assert (cost.events_per_read, cost.num_failed) == (2.0, 0)


def test_goals_are_ratios_of_one_run() -> None:
    measured = {
        DIRECT: costs(0.0, 0.0, 1.0),
        RELAY: costs(10.0, 20.0, 1.1),
        KVOY: costs(11.0, 360.0, 1.4),
        ENVOY: costs(12.0, 100.0, 1.2),
        VLLM_ROUTER: costs(14.0, 400.0, 1.9),
        "gatherer": costs(1.0, 900.0, 3.0, events_per_read=100.0),
    }

    by_order = cost_goals(measured)

    assert all(goal.is_met for goal in by_order)
    assert by_order[0].figure == pytest.approx(1.1)
    assert by_order[1].figure == pytest.approx(11 / 12)
    assert "envoy" in by_order[1].name
    assert by_order[2].figure == pytest.approx(400 / 360)
    assert by_order[3].figure == pytest.approx(2.0)
    assert by_order[4].figure == pytest.approx(3.6)


def test_without_a_peer_its_goals_are_missed_and_not_left_out() -> None:
    measured = {DIRECT: costs(0, 0, 1), RELAY: costs(10, 1, 1), KVOY: costs(10, 1, 1)}

    goals = cost_goals(measured)

    assert [goal.is_met for goal in goals] == [True, False, False, False, False]


def test_hit_rate_and_spread_count_together_and_the_best_other_is_named() -> None:
    mixes = {
        "even": {KVOY: placement(1.0, 0.8), "a": placement(2.0, 0.9), "b": placement(1.0, 0.5)},
        "piled": {KVOY: placement(4.0, 0.8), "a": placement(1.0, 0.3)},
        "nothing to reuse": {KVOY: placement(1.0, 0.0), "a": placement(1.1, 0.01)},
    }

    even, piled, nothing = placement_goals(mixes)

    assert even.is_met
    assert "(b)" in even.name
    assert not piled.is_met
    assert nothing.is_met


def test_the_report_names_who_is_absent_and_why() -> None:
    rows = [Row("smg", "1", "cache_aware", "not measured: no wheel")]
    report = build_report("setting", rows, {}, {"mix": {KVOY: placement(1, 1)}}, (0.5, 1.0))

    assert report.tables[0].rows == (("smg", "1", "cache_aware", "not measured: no wheel"),)
    assert [goal.is_met for goal in report.goals] == [False]
    assert msgspec.json.encode(report.figures)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_is_pinned_and_leads_to_all_engines_on_loopback(peer: Peer) -> None:
    requirements = Requirements.of(peer.name)
    launches = peer.launches(PLACE)
    words = " ".join([*launches[-1].command, *launches[-1].files.values()])

    assert peer.package in requirements.versions
    assert "127.0.0.1" in words
    assert "0.0.0.0" not in words
    if not peer.brings_engines:
        assert all(str(port) in words for port in PLACE.engine_ports)


def test_every_requirement_is_a_name_and_a_version_and_nothing_else() -> None:
    assert parse_pins("# made by uv\nA-b==1.0\n\nc==2\n") == {"a-b": "1.0", "c": "2"}
    for line in ("a>=1", "a", "--index-url somewhere", "==1"):
        with pytest.raises(ValueError, match="NAME==VERSION"):
            parse_pins(line)


@pytest.mark.parametrize(
    "wrong", [{"peers": ("nobody",)}, {"parts": ("all",)}, {"repeats": 0}, {"limit": 0.0}]
)
def test_a_wrong_setting_is_named(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"--{name}"):
        PeersConfig(**wrong)  # type: ignore[arg-type]


def test_a_next_turn_is_the_history_and_one_message_more() -> None:
    history = Conversation.of_words(400, 100, seed=1)

    first = parse_chat(history.next_turn("bench", "one?").body)
    other = parse_chat(history.next_turn("bench", 'an "other"?').body)
    alone = parse_chat(Conversation(b"[").next_turn("bench", "x").body)

    assert [message.role for message in first.messages] == ["user", "assistant"] * 2 + ["user"]
    assert first.messages[:-1] == other.messages[:-1]
    assert other.messages[-1].content == 'an "other"?'
    assert len(alone.messages) == 1


def test_histories_have_about_the_length_asked_for_and_differ() -> None:
    one, other = conversations(8_000, 2, tokens_per_word=2.0)

    words = sum(len(m["content"].split()) for m in json.loads(one.opening + b"]"))
    assert words == 4_000
    assert one != other


def test_questions_of_a_group_share_their_prefix_and_no_seed_shares_any() -> None:
    groups = Groups(3, 2, prefix_chars=50, question_chars=20)
    texts = [prompt[0]["content"] for prompt in groups.prompts("a")]

    assert texts[0][:50] == texts[1][:50] != texts[2][:50]
    assert len(set(texts)) == 6
    assert not set(texts) & {p[0]["content"] for p in groups.prompts("b")}
    passes = [prompt[0]["content"] for prompt in islice(drawn(groups.prompts("a"), "x"), 12)]
    assert sorted(passes[:6]) == sorted(texts) == sorted(passes[6:])


def test_users_who_chat_are_alike_for_one_seed() -> None:
    users = ChatUsers(2, num_turns=3)

    assert list(users.turns(0, "a")) == list(users.turns(0, "a"))
    assert [len(turn.text) for turn in users.turns(0, "a")] == [300, 120, 120]
    ours, theirs, anothers = (list(users.turns(*key)) for key in ((0, "a"), (0, "b"), (1, "a")))
    assert not {turn.text for turn in ours} & {turn.text for turn in theirs + anothers}
    assert [turn.think_s for turn in ours] == [turn.think_s for turn in theirs]
    assert [turn.think_s for turn in ours] != [turn.think_s for turn in anothers]
