"""What the router's index and its pick cost, measured in a process of its own, whose memory is then
the index' memory.

`python -m kvoy_cli.bench.index_child ENTRIES ENGINES REPEATS` prints one JSON object: `IndexCost`.
Times are CPU times, which other processes of the machine touch little."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from kvoy_cli.bench.processes import resident_bytes
from kvoy_cli.bench.stats import median
from kvoy_contract.blocks import BlockHash
from kvoy_router.audit import Audit
from kvoy_router.decision import Decision
from kvoy_router.endpoint import EngineInfo, LoadView
from kvoy_router.lineup import MAX_GROUPS
from kvoy_router.policies import make_policy
from kvoy_router.pool import Pool, PoolConfig
from kvoy_router.prefix_index import keys_of
from kvoy_router.request import InferenceRequest

HASH_BYTES = 16
STRIDE = 64
CHAIN = 100
"""Hashes that are stored together: a prompt of 6,400 tokens."""
LONG_PROMPT_TOKENS = 100_000
FLEETS = (8, 64, 1000)
POLICIES = ("kv-aware", "least-load", "round-robin", "random")
_MODEL = "model"
_FURTHER_HOLDERS = 3
_OTHER_LOOKUPS = 500_000
"""Between two measurements of a cold prompt: their entries take more room than any cache has."""


class MatchCost(msgspec.Struct, frozen=True):
    """The longest prefix of a long prompt of which every engine holds another length, in ms."""

    warm_ms: float
    """As a pick looks for it in a large fleet, again and again for the same prompt."""
    cold_ms: float
    """The same for a prompt whose entries are in no cache of the processor."""
    cold_all_ms: float
    """Likewise, with all lengths told apart."""


class IndexCost(msgspec.Struct, frozen=True):
    entries: int
    engines: int
    bytes_per_entry: float
    bytes_per_further_holder: float
    stored_per_s: float
    """Hash events, each an engine that holds one hash more."""
    shared_per_s: float
    """The same for hashes that others hold already."""
    removed_per_s: float
    match: MatchCost


class RouterCost(msgspec.Struct, frozen=True):
    index: IndexCost
    pick_us: dict[str, float]
    """By policy and fleet: `kv-aware 1000`. One request's pick, first token and end, and one load
    report of an engine."""
    audit_us: float


def measure(entries: int, engines: int, repeats: int) -> RouterCost:
    index = measure_index(entries, engines, repeats)
    gc.collect()
    decision, pick_us = _picks(repeats)
    return RouterCost(index, pick_us, _audit_us(decision))


def measure_index(entries: int, engines: int, repeats: int) -> IndexCost:
    random = Random(1)
    hashes = memoryview(random.randbytes(HASH_BYTES * entries))
    pool = Pool("bench", config=PoolConfig(max_index_entries=2 * entries + 6400))
    names = _add_engines(pool, engines)
    step = CHAIN * HASH_BYTES
    chains = [hashes[start : start + step] for start in range(0, len(hashes), step)]
    shared = chains[: max(1, len(chains) // 4)]
    removed = shared[: max(1, len(shared) // 4)]

    def store() -> None:
        for number, chain in enumerate(chains):
            pool.on_blocks(names[number % engines], b"", chain, False, 0.0)

    def remove() -> None:
        for number, chain in enumerate(removed):
            pool.on_blocks(names[number % engines], chain, b"", False, 0.0)

    empty = _resident()
    stored_s = _cpu_of(store)
    filled = _resident()
    shared_s = _cpu_of(lambda: _share(pool, names, shared, random))
    grown = _resident()
    match = _match_cost(pool, hashes, random, repeats)
    removed_s = _cpu_of(remove)
    num_shared = _FURTHER_HOLDERS * sum(map(len, shared)) // HASH_BYTES
    return IndexCost(
        entries=entries,
        engines=engines,
        bytes_per_entry=(filled - empty) / entries,
        bytes_per_further_holder=(grown - filled) / num_shared,
        stored_per_s=entries / stored_s,
        shared_per_s=num_shared / shared_s,
        removed_per_s=sum(map(len, removed)) / HASH_BYTES / removed_s,
        match=match,
    )


def _share(pool: Pool, names: Sequence[str], chains: Sequence[memoryview], random: Random) -> None:
    """Each chain gets further holders, other ones than its neighbours."""
    for number, chain in enumerate(chains):
        first = names[number % len(names)]
        others = [name for name in random.sample(names, _FURTHER_HOLDERS + 1) if name != first]
        for name in others[:_FURTHER_HOLDERS]:
            pool.on_blocks(name, b"", chain, False, 0.0)


def _match_cost(pool: Pool, hashes: memoryview, random: Random, repeats: int) -> MatchCost:
    """`hashes` are others that the index holds."""
    prompts = [_long_prompt(pool, random) for _ in range(2 * repeats + 1)]
    others = keys_of(hashes[: HASH_BYTES * _OTHER_LOOKUPS])

    def cold_s(prompt: bytes, max_groups: int) -> float:
        for key in others:
            pool.index.holders(key)
        return _cpu_of(lambda: _match(pool, prompt, max_groups))

    cold = [cold_s(prompt, MAX_GROUPS) for prompt in prompts[:repeats]]
    cold_all = [cold_s(prompt, sys.maxsize) for prompt in prompts[repeats:-1]]
    rounds = 20

    def match() -> None:
        for _ in range(rounds):
            _match(pool, prompts[-1], MAX_GROUPS)

    warm = [_cpu_of(match) / rounds for _ in range(repeats)]
    return MatchCost(1000 * median(warm), 1000 * median(cold), 1000 * median(cold_all))


def _long_prompt(pool: Pool, random: Random) -> bytes:
    """Hashes of a prompt of which each engine holds another length."""
    count = LONG_PROMPT_TOKENS // STRIDE
    prompt = random.randbytes(HASH_BYTES * count)
    for number, endpoint in enumerate(pool.endpoints):
        depth = count * (number + 1) // len(pool.endpoints)
        pool.index.store(endpoint.slot, keys_of(prompt[: depth * HASH_BYTES]))
    return prompt


def _match(pool: Pool, prompt: bytes, max_groups: int) -> None:
    pool.index.match_groups(keys_of(prompt), pool.assumed.sets, max_groups)


def _picks(repeats: int) -> tuple[Decision, dict[str, float]]:
    costs: dict[str, float] = {}
    for policy in POLICIES:
        for size in FLEETS:
            pool, requests, loads = _busy_fleet(policy, size)
            decisions: list[Decision] = []
            rounds = [
                _cpu_of(lambda: decisions.extend(_serve(pool, requests, loads)))  # noqa: B023
                for _ in range(repeats)
            ]
            costs[f"{policy} {size}"] = 1e6 * median(rounds) / len(requests)
    return decisions[0], costs


def _serve(
    pool: Pool, requests: Sequence[InferenceRequest], loads: Sequence[tuple[str, LoadView]]
) -> Sequence[Decision]:
    """Requests that overlap, and load reports between them."""
    under_way: list[Decision] = []
    served: list[Decision] = []
    for request, (name, load) in zip(requests, loads, strict=True):
        pool.on_load(name, load, 0.0)
        under_way.append(pool.pick(request, 0.0))
        if len(under_way) > len(requests) // 2:
            decision = under_way.pop(0)
            decision.lease.on_first_token(0.0)
            decision.lease.release(0.0, 100)
            served.append(decision)
    for decision in under_way:
        decision.lease.release(0.0, 100)
    return served


def _busy_fleet(
    policy: str, size: int
) -> tuple[Pool, Sequence[InferenceRequest], Sequence[tuple[str, LoadView]]]:
    """Engines that hold twelve of 150 prefixes each, from half idle to busy."""
    random = Random(2)
    pool = Pool("bench", make_policy(policy, random), random=random)
    names = _add_engines(pool, size)
    prefixes = [[BlockHash(random.randbytes(HASH_BYTES)) for _ in range(94)] for _ in range(150)]
    for name in names:
        for prefix in random.sample(prefixes, 12):
            pool.on_blocks(name, (), prefix, False, 0.0)
        pool.on_load(name, _some_load(random), 0.0)
    requests = [
        InferenceRequest(
            f"r{number}",
            _MODEL,
            112 * STRIDE,
            [*random.choice(prefixes), *(BlockHash(random.randbytes(16)) for _ in range(18))],
            max_tokens=1000,
        )
        for number in range(400)
    ]
    return pool, requests, [(random.choice(names), _some_load(random)) for _ in requests]


def _some_load(random: Random) -> LoadView:
    return LoadView(
        running=random.randrange(60),
        waiting=random.randrange(3),
        queued_prefill_tokens=random.randrange(4000),
        free_blocks=random.randrange(10_000),
        evictable_blocks=random.randrange(10_000),
        total_blocks=20_000,
        prefill_tokens_per_s=10_000 * random.uniform(1.0, 1.02),
        step_time_s=random.uniform(0.02, 0.025),
        running_tokens=random.randrange(200_000),
        admitted_through=1_000_000_000,
    )


def _add_engines(pool: Pool, count: int) -> Sequence[str]:
    names = [f"engine-{number}" for number in range(count)]
    info = EngineInfo(epoch=b"1", served_model=_MODEL, max_num_seqs=256, settles_by_number=True)
    for name in names:
        pool.add_endpoint(name)
        pool.on_describe(name, info, 0.0)
        pool.on_snapshot_begin(name, 0.0)
        pool.on_snapshot_end(name, 0.0)
    return names


def _audit_us(decision: Decision) -> float:
    audit, count = Audit(), 10_000

    def compare() -> None:
        for _ in range(count):
            audit.on_answer(decision, 6000, 0.2)

    return 1e6 * _cpu_of(compare) / count


def _cpu_of(work: Callable[[], object]) -> float:
    begin_s = time.process_time()
    work()
    return time.process_time() - begin_s


def _resident() -> int:
    gc.collect()
    return resident_bytes(os.getpid())


if __name__ == "__main__":
    cost = measure(*map(int, sys.argv[1:4]))
    sys.stdout.write(msgspec.json.encode(cost).decode() + "\n")
