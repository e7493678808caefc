import gc
import tracemalloc
from random import Random

import pytest

from kvoy_contract.blocks import BlockHash
from kvoy_router.prefix_index import NUM_SHARDS, PrefixIndex, keys_of, slots_of


def chain(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.getrandbits(64) for _ in range(length)]


def test_keys_are_the_same_for_packed_and_single_hashes() -> None:
    hashes = [BlockHash(bytes([n]) * 16) for n in range(5)]

    assert keys_of(hashes) == keys_of(b"".join(hashes))
    assert len(keys_of(hashes)) == 5
    with pytest.raises(ValueError, match="17 bytes"):
        keys_of(b"x" * 17)


def test_one_walk_finds_the_longest_prefix_of_every_endpoint() -> None:
    index = PrefixIndex()
    prompt = chain(1, 113)
    depths = [0, 1, 2, 56, 57, 112, 113]
    slots = [index.add_slot() for _ in depths]
    for slot, depth in zip(slots, depths, strict=True):
        index.store(slot, prompt[:depth])

    expected = {slot: depth for slot, depth in zip(slots, depths, strict=True) if depth}
    assert index.match(prompt) == expected
    assert index.match(prompt[:1]) == {slot: 1 for slot in expected}
    assert index.match([]) == {}


def test_bisection_equals_a_linear_walk_over_prefix_closed_sets() -> None:
    random = Random(7)
    index = PrefixIndex()
    trunks = [chain(n, 40) for n in range(6)]
    slots = [index.add_slot() for _ in range(30)]
    held: dict[int, set[int]] = {slot: set() for slot in slots}
    for slot in slots:
        for trunk in random.sample(trunks, 3):
            keys = trunk[: random.randrange(41)]
            index.store(slot, keys)
            held[slot].update(keys)

    for trunk in trunks:
        prompt = trunk[: random.randrange(1, 41)]
        linear = {}
        for slot in slots:
            depth = next((i for i, key in enumerate(prompt) if key not in held[slot]), len(prompt))
            if depth:
                linear[slot] = depth
        assert index.match(prompt) == linear


@pytest.mark.parametrize("max_groups", [1, 3, 16])
def test_a_bounded_walk_finds_the_deepest_exactly_and_of_the_rest_at_least_what_it_says(
    max_groups: int,
) -> None:
    random = Random(11)
    index = PrefixIndex()
    prompt = chain(1, 300)
    depths = {index.add_slot(): random.randrange(1, 301) for _ in range(80)}
    for slot, depth in depths.items():
        index.store(slot, prompt[:depth])

    groups = index.match_groups(prompt, max_groups=max_groups)

    told = [depth for depth, _ in groups]
    assert told == sorted(told, reverse=True)
    found = {slot: depth for depth, bits in groups for slot in slots_of(bits)}
    assert found.keys() == depths.keys()
    assert all(found[slot] <= depths[slot] for slot in depths)
    deepest = sorted(set(depths.values()), reverse=True)[:max_groups]
    assert all(found[slot] == depth for slot, depth in depths.items() if depth in deepest)
    assert len(groups) <= max_groups + 10


def test_events_out_of_order_never_make_up_what_an_engine_does_not_hold() -> None:
    """A lost or late event leaves holes. What is told then is a place that the engine does hold and
    after which it holds nothing: at worst the part before it is computed again."""
    random = Random(5)
    index = PrefixIndex()
    slots = [index.add_slot() for _ in range(6)]
    held: dict[int, set[int]] = {slot: set() for slot in slots}
    prompts = [chain(n, 60) for n in range(5)]
    events = [
        (slot, prompt[begin : begin + random.randrange(1, 20)], random.random() < 0.6)
        for slot in slots
        for prompt in prompts
        for begin in range(0, 60, 7)
        for _ in range(2)
    ]
    random.shuffle(events)
    for slot, keys, is_stored in events:
        if is_stored:
            index.store(slot, keys)
            held[slot].update(keys)
        else:
            index.remove(slot, keys)
            held[slot].difference_update(keys)

    index.check_integrity()
    for prompt in prompts:
        for slot, depth in index.match(prompt).items():
            assert prompt[depth - 1] in held[slot]
            assert depth == len(prompt) or prompt[depth] not in held[slot]


def test_an_engine_that_evicts_what_is_just_being_matched_leaves_nothing_behind() -> None:
    """Stored, removed and stored again by many engines at once, in every order: the index ends with
    what the last event of each says."""
    random = Random(8)
    keys = chain(1, 40)
    for _ in range(50):
        index = PrefixIndex()
        slots = [index.add_slot() for _ in range(4)]
        last: dict[tuple[int, int], bool] = {}
        for _ in range(60):
            slot, begin = random.choice(slots), random.randrange(40)
            some = keys[begin : begin + 8]
            is_stored = random.random() < 0.5
            (index.store if is_stored else index.remove)(slot, some)
            last |= {(slot, key): is_stored for key in some}
        for (slot, key), is_held in last.items():
            assert bool(index.holders(key) >> slot & 1) is is_held
        for slot in slots:
            index.forget(slot)
        while index.sweep():
            pass
        assert len(index) == 0


def test_assumed_blocks_count_as_held() -> None:
    index = PrefixIndex()
    prompt = chain(1, 10)
    slot = index.add_slot()
    index.store(slot, prompt[:4])

    assert index.match(prompt, {key: 1 << slot for key in prompt[4:7]}) == {slot: 7}


def test_duplicates_reordering_and_double_removal_change_nothing() -> None:
    index = PrefixIndex()
    a, b = index.add_slot(), index.add_slot()
    keys = chain(1, 8)

    index.store(a, keys)
    index.store(a, list(reversed(keys)))
    index.store(b, keys[:2])
    index.remove(b, keys)
    index.remove(b, keys)

    assert index.match(keys) == {a: 8}
    assert (index.num_held(a), index.num_held(b), len(index)) == (8, 0, 8)
    index.check_integrity()


def test_a_forgotten_endpoint_holds_nothing_at_once_and_its_entries_go() -> None:
    index = PrefixIndex()
    a, b = index.add_slot(), index.add_slot()
    keys = chain(1, 1000)
    index.store(a, keys)
    index.store(b, keys[:500])

    index.forget(a)
    assert index.match(keys) == {b: 500}
    while index.sweep():
        pass

    assert len(index) == 500
    index.check_integrity()


def test_a_slot_is_not_used_again_before_its_old_entries_are_gone() -> None:
    index = PrefixIndex()
    keys = chain(1, 1000)
    for _ in range(50):
        slot = index.add_slot()
        assert index.match(keys) == {}
        index.store(slot, keys)
        index.forget(slot)

    while index.sweep():
        pass
    assert len(index) == 0
    assert index.add_slot() < 8
    index.check_integrity()


def test_the_number_of_entries_is_bounded_and_a_hot_prefix_survives() -> None:
    index = PrefixIndex(max_entries=NUM_SHARDS * 64)
    slot = index.add_slot()
    hot = chain(0, 20)
    index.store(slot, hot)

    for number in range(1, 2000):
        index.store(slot, chain(number, 16))
        index.touch(hot)

    assert len(index) <= index.max_entries
    assert index.num_evicted > 0
    assert index.match(hot) == {slot: 20}
    index.check_integrity()


@pytest.mark.slow
def test_an_entry_costs_less_than_200_bytes_and_a_further_holder_less_than_16() -> None:
    num_entries = 40_000
    keys = chain(1, num_entries)
    packed = b"".join(key.to_bytes(8, "little") + bytes(8) for key in keys)
    del keys
    index = PrefixIndex()
    slots = [index.add_slot() for _ in range(8)]
    gc.collect()
    tracemalloc.start()
    try:
        index.store(slots[0], keys_of(packed))
        first = tracemalloc.get_traced_memory()[0]
        for slot in slots[1:]:
            index.store(slot, keys_of(packed))
        all_of_them = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert first / num_entries < 200
    assert (all_of_them - first) / num_entries / 7 < 16
    assert index.approximate_bytes() == pytest.approx(all_of_them, rel=0.3)


def test_random_operations_leave_the_index_consistent() -> None:
    random = Random(3)
    index = PrefixIndex(max_entries=NUM_SHARDS * 20)
    keys = chain(1, 3000)
    slots: list[int] = []
    for _ in range(3000):
        action = random.random()
        some = random.sample(keys, 20)
        if action < 0.05 or not slots:
            slots.append(index.add_slot())
        elif action < 0.1:
            index.forget(slots.pop(random.randrange(len(slots))))
        elif action < 0.6:
            index.store(random.choice(slots), some)
        elif action < 0.9:
            index.remove(random.choice(slots), some)
        else:
            index.sweep()
    index.check_integrity()


def test_slots_are_the_positions_of_the_bits() -> None:
    assert list(slots_of(0b1010_0001)) == [0, 5, 7]
