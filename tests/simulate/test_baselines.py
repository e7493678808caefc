"""Baseline policies on views made by hand: each chooses by what its name says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from kvoy_contract.blocks import BlockHash
from kvoy_router.cost import Traffic
from kvoy_router.endpoint import Endpoint, EngineInfo, LoadView
from kvoy_router.lease import Ledger
from kvoy_router.occupancy import Occupancy
from kvoy_router.policies import Policy, View
from kvoy_router.request import InferenceRequest
from kvoy_simulate.baselines import EVERY_POLICY, policy_maker

TRAFFIC = Traffic(output_tokens=100.0, reuse=0.5)
RATE = 16_000.0


def endpoint(number: int, num_blocks: int = 1000) -> Endpoint:
    made = Endpoint(f"engine-{number}", f"engine-{number}:1", number, Ledger())
    made.info = EngineInfo(epoch=b"e", served_model="m", num_blocks=num_blocks)
    return made


def view(
    at: Endpoint,
    *,
    cached: int = 0,
    running: float = 0,
    waiting: float = 0,
    queued_tokens: float = 0,
    used_share: float = 0.0,
) -> View:
    occupancy = Occupancy(
        is_known=True,
        running=running,
        waiting=waiting,
        queued_tokens=queued_tokens,
        context_tokens=0,
        free_tokens=16_000 * (1 - used_share),
        evictable_tokens=0,
        total_tokens=16_000,
        max_running=256,
        prefill_tokens_per_s=RATE,
        step_s=0.02,
        step_s_per_token=0,
    )
    return View(at, cached, occupancy)


def request(
    group: str, session: str = "s", tokens: int = 1000, length: int = 10
) -> InferenceRequest:
    hashes = [BlockHash(f"{group:>8}{i:>8}".encode()) for i in range(length)]
    return InferenceRequest("r", "m", tokens, hashes, affinity=session.encode())


def choose(policy: Policy, asked: InferenceRequest, views: Sequence[View]) -> str:
    position, candidates = policy.choose(asked, views, TRAFFIC)
    assert [c.endpoint_id for c in candidates] == [v.endpoint.id for v in views]
    return views[position].endpoint.id


ENGINES = [endpoint(number) for number in range(4)]
IDLE = [view(engine) for engine in ENGINES]


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_every_policy_has_its_name_and_chooses_with_one_engine(name: str) -> None:
    policy = policy_maker(name)(Random(0))

    assert policy.name == name
    assert choose(policy, request("g"), IDLE[:1]) == "engine-0"


def test_an_unknown_policy_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ValueError, match=r"one of kv-aware, .*holder-18s, not 'best'"):
        policy_maker("best")


def test_partition_gives_every_engine_equally_many_groups_and_keeps_them() -> None:
    policy = policy_maker("partition")(Random(0))
    busy = [view(ENGINES[0], waiting=99), *IDLE[1:]]

    homes = {f"g{n}": choose(policy, request(f"g{n}"), IDLE) for n in range(12)}
    later = {group: choose(policy, request(group, tokens=7), busy) for group in homes}

    assert Counter(homes.values()) == {engine.id: 3 for engine in ENGINES}
    assert later == homes


def test_partition_sends_a_group_elsewhere_only_while_its_engine_is_away() -> None:
    policy = policy_maker("partition")(Random(0))
    home = choose(policy, request("g"), IDLE)
    others = [view(e, running=e.slot) for e in ENGINES if e.id != home]

    meanwhile = choose(policy, request("g"), others)

    assert meanwhile == min(others, key=lambda v: v.occupancy.running).endpoint.id
    assert choose(policy, request("g"), IDLE) == home


def test_session_hash_keeps_sessions_and_moves_few_when_an_engine_leaves() -> None:
    policy = policy_maker("session-hash")(Random(0))
    names = [f"s{n}" for n in range(200)]

    homes = {name: choose(policy, request("g", name), IDLE) for name in names}
    after = {name: choose(policy, request("g", name), IDLE[:3]) for name in names}

    assert min(Counter(homes.values()).values()) > 30
    moved = [name for name in names if homes[name] != after[name]]
    assert moved == [name for name in names if homes[name] == "engine-3"]


def test_sticky_begins_at_the_least_load_and_stays() -> None:
    policy = policy_maker("sticky")(Random(0))
    first = [view(e, running=5 - e.slot) for e in ENGINES]
    later = [view(e, running=e.slot, waiting=50 * (e.slot == 3)) for e in ENGINES]

    assert choose(policy, request("g", "chat"), first) == "engine-3"
    assert choose(policy, request("g", "chat"), later) == "engine-3"
    assert choose(policy, request("g", "other"), later) == "engine-0"
    assert choose(policy, request("g", "chat"), later[:3]) == "engine-0"


def test_prefix_only_goes_to_the_longest_prefix_whatever_the_load() -> None:
    policy = policy_maker("prefix-only")(Random(0))
    views = [*IDLE[:3], view(ENGINES[3], cached=64, waiting=500, queued_tokens=1e6)]

    assert choose(policy, request("g"), views) == "engine-3"


def test_approximate_prefix_believes_that_what_it_sent_is_still_there() -> None:
    policy = policy_maker("approximate-prefix")(Random(0))
    home = choose(policy, request("g"), IDLE)
    evicted = [view(e, cached=640 if e.id != home else 0) for e in ENGINES]

    assert choose(policy, request("g"), evicted) == home


def told(at: Endpoint, *, waiting: int = 0, used_share: float = 0.0, at_s: float = 0.0) -> View:
    """A view of an engine whose last report says so."""
    at.load = LoadView(
        waiting=waiting, free_blocks=1000 - int(1000 * used_share), total_blocks=1000
    )
    at.load_s = at_s
    return view(at)


def test_approximate_prefix_leaves_for_shorter_queue_and_emptier_memory() -> None:
    engines = [endpoint(number) for number in range(4)]
    policy = policy_maker("approximate-prefix")(Random(0))
    home = choose(policy, request("g"), [told(e) for e in engines])
    # Prefix 3 against queue 2 and memory 2 x 0.6.
    busy = [
        told(e, waiting=9, used_share=0.6, at_s=1.0) if e.id == home else told(e, at_s=1.0)
        for e in engines
    ]

    assert choose(policy, request("g"), busy) != home


def test_approximate_prefix_sees_queues_as_they_were_when_it_last_looked() -> None:
    engines = [endpoint(number) for number in range(2)]
    policy = policy_maker("approximate-prefix")(Random(0))
    idle, busy = engines
    first = choose(policy, request("a"), [told(idle), told(busy, waiting=9)])

    later = [told(idle, waiting=9, at_s=0.04), told(busy, at_s=0.04)]
    in_between = choose(policy, request("b"), later)
    later = [told(idle, waiting=9, at_s=0.05), told(busy, at_s=0.05)]

    assert (first, in_between) == (idle.id, idle.id)
    assert choose(policy, request("c"), later) == busy.id


def test_approximate_prefix_forgets_what_it_sent_longest_ago() -> None:
    policy = policy_maker("approximate-prefix")(Random(0))
    one, other = endpoint(0, num_blocks=15), endpoint(1, num_blocks=15)
    first = [told(one), told(other, used_share=0.5)]
    assert [choose(policy, request(group), first) for group in "ab"] == [one.id, one.id]
    turned = [told(one, used_share=0.9, at_s=1.0), told(other, at_s=1.0)]

    # Of 15 hashes ten are b's and five the rest of a's, whose first ones nobody has any more.
    assert choose(policy, request("b"), turned) == one.id
    assert choose(policy, request("a"), turned) == other.id


def test_approximate_prefix_credits_an_engine_that_has_lost_the_beginning() -> None:
    policy = policy_maker("approximate-prefix")(Random(0))
    small, large = endpoint(0, num_blocks=15), endpoint(1)
    only_small, only_large = [told(small)], [told(large)]
    for group in "ab":
        choose(policy, request(group), only_small)
    choose(policy, request("a", length=5), only_large)
    both = [told(small, at_s=1.0), told(large, used_share=0.1, at_s=1.0)]

    # The first five hashes are at one, the other five at the other, whose memory is emptier.
    assert choose(policy, request("a"), both) == small.id


def test_holder_stays_until_its_queue_is_eighteen_seconds_longer() -> None:
    policy = policy_maker("holder-18s")(Random(0))

    def with_queue(seconds: float) -> str:
        holder = view(ENGINES[0], cached=900, queued_tokens=seconds * RATE)
        return choose(policy, request("g"), [holder, *IDLE[1:]])

    assert with_queue(17.9) == "engine-0"
    assert with_queue(18.1) != "engine-0"


def test_holder_needs_four_fifths_of_the_prompt_and_takes_the_shortest_queue() -> None:
    policy = policy_maker("holder-18s")(Random(0))
    partly = [view(ENGINES[0], cached=790), view(ENGINES[1], queued_tokens=100), *IDLE[2:3]]
    both = [view(ENGINES[0], cached=1000, queued_tokens=5000), view(ENGINES[1], cached=800)]

    assert choose(policy, request("g"), partly) == "engine-0"
    assert choose(policy, request("g"), both) == "engine-1"
