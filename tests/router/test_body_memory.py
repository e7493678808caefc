"""Who may have how much of a router's memory for requests."""

from __future__ import annotations

import random

import pytest

from kvoy_router import router_memory
from kvoy_router.body_cost import decoding_bytes
from kvoy_router.body_memory import SMALL_BODY_BYTES, BodyMemory, Budget, Claim, Room
from kvoy_router.memory_balance import MIB, MemoryBalance


def memory_of(now: int, least: int = 0) -> BodyMemory:
    return BodyMemory(Budget(now=now, most=now, least=least))


def rooms_of(memory: BodyMemory) -> tuple[Room, ...]:
    return (memory.held, memory.unread, memory.decoding, memory.encoding, memory.reading)


def test_large_bodies_get_a_part_and_small_requests_whatever_is_left() -> None:
    memory = memory_of(1600)

    first, second = memory.held.claim(400), memory.held.claim(200)

    assert (first.is_held, second.is_held) == (True, False)
    assert memory.take(1200)
    assert not memory.take(1)


def test_all_large_ones_together_leave_a_part_to_small_requests() -> None:
    memory = memory_of(1600)
    for room in rooms_of(memory)[:-1]:
        assert room.claim(room.max_bytes).is_held

    assert memory.used_bytes == 1350
    assert memory.take(200)


def test_the_last_of_the_memory_is_for_short_requests() -> None:
    memory = memory_of(3_200_000)
    assert not memory.take(3_150_000)
    assert memory.take(3_100_000)

    assert not memory.take(5000)
    assert memory.take(4000)


def test_small_requests_that_fill_the_memory_keep_large_ones_waiting() -> None:
    memory = memory_of(1600)
    memory.take(1300)
    claim = memory.held.claim(200)
    assert not claim.is_held

    memory.give_back(100)

    assert claim.is_held


def test_places_are_given_in_order_also_to_a_smaller_one_behind() -> None:
    memory = memory_of(1600)
    told: list[str] = []
    first = memory.held.claim(500)
    large = memory.held.claim(400, lambda: told.append("large"))
    small = memory.held.claim(1, lambda: told.append("small"))
    assert not small.is_held

    first.end()

    assert told == ["large", "small"]
    assert large.is_held


def test_what_would_not_fit_even_alone_keeps_nobody_waiting_until_there_is_more_again() -> None:
    memory = memory_of(1600)
    memory.use(Budget(now=800, most=1600))
    told: list[str] = []
    large = memory.held.claim(400, lambda: told.append("large"))
    behind = memory.held.claim(200)
    assert (large.is_held, behind.is_held, memory.held.num_waiting) == (False, True, 1)

    memory.use(Budget(now=1600, most=1600))
    assert told == []
    last = memory.held.claim(200, lambda: told.append("last"))
    behind.end()

    assert told == ["large"]
    large.end()
    assert last.is_held


def test_a_budget_that_shrinks_lets_those_behind_pass_what_does_not_fit_any_more() -> None:
    memory = memory_of(1600)
    first = memory.held.claim(500)
    large, small = memory.held.claim(400), memory.held.claim(200)
    assert not small.is_held
    first.end()
    assert (large.is_held, small.is_held) == (True, False)
    again = memory.held.claim(400)
    large.end()

    assert (small.is_held, again.is_held) == (True, False)
    memory.use(Budget(now=1200, most=1600))
    small.end()
    assert not again.is_held
    assert memory.held.claim(300).is_held


def test_a_wish_that_shrinks_is_granted_at_once() -> None:
    memory = memory_of(1600)
    memory.held.claim(300)
    claim = memory.held.claim(400)
    assert not claim.is_held

    claim.resize(200)

    assert claim.is_held


def test_who_gives_up_lets_the_next_one_in_and_hears_nothing() -> None:
    memory = memory_of(1600)
    told: list[str] = []
    memory.held.claim(300)
    gone = memory.held.claim(300, lambda: told.append("gone"))
    memory.held.claim(200, lambda: told.append("next"))

    gone.end()
    gone.end()

    assert told == ["next"]
    assert memory.held.used_bytes == 500


def test_a_place_shrinks_for_others_and_grows_only_where_there_is_room() -> None:
    memory = memory_of(1600)
    claim = memory.held.claim(500)
    other = memory.held.claim(100)

    assert claim.resize(400)
    assert other.is_held
    assert not claim.resize(401)
    other.end()
    assert claim.resize(500)
    claim.end()

    assert memory.used_bytes == 0


def test_what_is_held_meanwhile_ends_when_the_place_is_there() -> None:
    memory = memory_of(1600)
    first, second = memory.held.claim(500), memory.held.claim(500)
    second.meanwhile = memory.unread.claim(90)

    first.end()

    assert second.is_held
    assert memory.unread.used_bytes == 0


def test_a_budget_that_shrinks_takes_nothing_away_and_lets_nobody_in() -> None:
    memory = memory_of(1600)
    claim = memory.held.claim(500)

    memory.use(Budget(now=160, most=1600, least=640))

    assert claim.is_held
    assert not memory.held.claim(1).is_held
    assert memory.take(100)
    assert memory.reading.claim(1).is_held, "small ones have the least that there is for them"
    assert not memory.take(40)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_all_is_counted_once_and_no_bound_is_passed(seed: int) -> None:
    draw = random.Random(seed)
    memory = memory_of(10_000)
    claims: list[Claim] = []
    small = 0
    for _ in range(2000):
        match draw.randrange(5):
            case 0:
                room = draw.choice(rooms_of(memory))
                claims.append(room.claim(draw.randrange(1, room.most_bytes + 1)))
            case 1 if claims:
                claims.pop(draw.randrange(len(claims))).end()
            case 2 if claims:
                draw.choice(claims).resize(draw.randrange(1, 600))
            case 3:
                size = draw.randrange(1, 2000)
                small += size if memory.take(size) else 0
            case _:
                memory.give_back(part := draw.randrange(small + 1))
                small -= part
        held = sum(claim.num_bytes for claim in claims if claim.is_held)
        assert memory.used_bytes == held + small <= memory.max_bytes
        assert memory.num_waiting == sum(not claim.is_held for claim in claims)
        for room in rooms_of(memory):
            assert room.used_bytes <= room.max_bytes
    memory.give_back(small)
    for claim in list(claims):
        claim.end()
    assert (memory.used_bytes, memory.num_waiting) == (0, 0)


@pytest.mark.parametrize("item", [b"1,", b"[],", b"12345,"])
def test_the_worst_small_body_has_room_to_be_decoded_in_however_little_memory(item: bytes) -> None:
    body = (b'{"prompt":[' + item * SMALL_BODY_BYTES)[:SMALL_BODY_BYTES]

    assert decoding_bytes(body, has_ids=True) <= memory_of(0).reading.most_bytes


# How much that is.


def test_requests_have_what_everything_else_leaves_of_nine_tenths_of_the_limit() -> None:
    balance = MemoryBalance(1000 * MIB, 64_000 * MIB, idle_bytes=100 * MIB)
    assert balance.budget == Budget(800 * MIB, 800 * MIB, int(62.5 * MIB))

    balance.look(resident_bytes=350 * MIB, used_bytes=50 * MIB)

    assert balance.budget.now == 600 * MIB
    assert balance.budget.most == 800 * MIB


def test_a_peak_of_everything_else_is_forgotten_slowly() -> None:
    balance = MemoryBalance(1000 * MIB, 64_000 * MIB, idle_bytes=100 * MIB)
    balance.look(500 * MIB, 0)

    balance.look(100 * MIB, 0)
    soon = balance.budget.now
    for _ in range(1000):
        balance.look(100 * MIB, 0)

    assert 400 * MIB < soon < 410 * MIB
    assert balance.budget.now == 800 * MIB


def test_an_estimate_that_is_too_high_does_not_make_everything_else_vanish() -> None:
    balance = MemoryBalance(1000 * MIB, 64_000 * MIB, idle_bytes=100 * MIB)

    balance.look(resident_bytes=150 * MIB, used_bytes=400 * MIB)

    assert balance.budget.now == 800 * MIB


def test_everything_else_beyond_the_limit_leaves_the_least_for_small_requests() -> None:
    balance = MemoryBalance(512 * MIB, 64_000 * MIB, idle_bytes=100 * MIB)

    balance.look(600 * MIB, 0)

    assert balance.budget.now == 0
    assert balance.budget.least == 32 * MIB


@pytest.mark.parametrize(
    ("limit_mib", "machine_mib", "told_mib", "expected_mib"),
    [
        (None, 4000, None, 1000),
        (None, 64_000, None, 2048),
        (None, 64_000, 4096, 4096),
        (1000, 64_000, None, 800),
        (1000, 64_000, 300, 300),
        (1000, 64_000, 900, 800),
    ],
)
def test_a_bound_that_is_told_counts_as_far_as_there_is_memory(
    limit_mib: int | None, machine_mib: int, told_mib: int | None, expected_mib: int
) -> None:
    limit = None if limit_mib is None else limit_mib * MIB
    balance = MemoryBalance(limit, machine_mib * MIB, idle_bytes=100 * MIB)
    balance.told_bytes = None if told_mib is None else told_mib * MIB

    assert balance.budget.now == expected_mib * MIB


@pytest.mark.parametrize(
    ("limit_mib", "told_mib", "expected_mib"),
    [(None, None, 256), (None, 7, 7), (512, None, 64), (512, 300, 300), (8192, None, 256)],
)
def test_what_may_be_full_for_good_gets_an_eighth_of_a_small_limit(
    limit_mib: int | None, told_mib: int | None, expected_mib: int
) -> None:
    limit = None if limit_mib is None else limit_mib * MIB

    assert MemoryBalance(limit, 64_000 * MIB, 0).cache_bytes(told_mib) == expected_mib * MIB


def test_free_memory_is_returned_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every long prompt it doubled what such a prompt costs."""
    now_s = 50.0
    trims: list[float] = []
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr(router_memory, "return_free_memory", lambda: trims.append(now_s))
    free = router_memory.FreeMemory()

    for tick in range(25):
        now_s = 50.0 + tick / 8
        free.give_back()

    assert trims == [50.0, 51.0, 52.0, 53.0]
