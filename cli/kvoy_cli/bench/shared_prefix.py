"""`kvoy bench shared-prefix`: many groups of five questions on eight simulated engines.

The published workload (150 groups, 6,000 + 1,200 + 1,000 tokens, 307,328 KV tokens per engine),
all sizes a tenth, so that two cores carry it: the ratios between prefix, question, output and KV
stay. As there, traffic draws from the same 750 prompts for ever, each pass in a new random
order. Both policies have a fleet of their own, warmed by one pass, and are measured in turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count, islice

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.knee import Ladder, climb
from kvoy_cli.bench.load import LoadRun, run_closed_loop, run_open_loop
from kvoy_cli.bench.outcome import LoadFigures, summarise
from kvoy_cli.bench.processes import BenchError, Child, tree_cpu_seconds
from kvoy_cli.bench.report import Report
from kvoy_cli.bench.request import Request, completion
from kvoy_cli.bench.schedule import poisson_offsets
from kvoy_cli.bench.shared_prefix_report import (
    Comparison,
    NoReuse,
    Offered,
    Sizes,
    build_report,
)
from kvoy_cli.bench.stack import Engine, engines, router, sim_engine
from kvoy_cli.bench.workloads import (
    SharedPrefixShape,
    shared_prefix_prompts,
    short_prompts,
    shuffled_forever,
)

POLICIES = ("kv-aware", "round-robin")
NO_REUSE_POLICIES = ("kv-aware", "round-robin", "least-load", "random")
_LADDER_FACTOR = 1.3
_COMPARISON_SEED = 100
_NO_REUSE_SEED = 500
_SMOKE = Sizes(
    shape=SharedPrefixShape(4, 2, 48, 16, 4),
    num_engines=2,
    ramp_s=0.2,
    window_s=0.5,
    backlog_s=0.5,
    drain_s=2.0,
    no_reuse_s=0.5,
    prefill_tokens_per_s=20_000.0,
    step_s=0.002,
    start_rate=20.0,
    warm_users=4,
    num_refinements=0,
    max_rungs=2,
)


@dataclass(slots=True)
class _Fleet:
    """Engines, their router and a client of it; and how it was used so far."""

    client: Client
    router: Child
    engines: list[Engine]
    cpu_shares: list[tuple[float, float, float]] = field(default_factory=list)
    """(router, all engines, load generator) per run, of one core each."""


async def run(context: BenchContext) -> Report:
    sizes = _SMOKE if context.is_smoke else Sizes()
    prompts = shared_prefix_prompts(sizes.shape, seed=1)
    async with AsyncExitStack() as stack:
        fleets: dict[str, _Fleet] = {}
        for policy in POLICIES:
            context.say(f"starting {sizes.num_engines} simulated engines and a {policy} router")
            fleets[policy] = await _start(stack, context, sizes, policy)
        for policy, fleet in fleets.items():
            context.say(f"warming the {policy} fleet: every prompt once")
            await _warm(fleet, sizes, prompts, context.served_name)
        ladder = await _find_knee(context, sizes, fleets["round-robin"], prompts)
        if not ladder.knee:
            raise BenchError(f"round-robin is beyond {sizes.bound_s:g} s at every rate tried")
        comparisons = [
            await _compare(context, sizes, fleets, prompts, ladder.knee, offered)
            for offered in (
                Offered(1.5, 0.0, sizes.backlog_s, sizes.drain_s),
                Offered(3.0, sizes.ramp_s, sizes.window_s, 0.0),
            )
        ]
        cpu_shares = [share for fleet in fleets.values() for share in fleet.cpu_shares]
        no_reuse = await _no_reuse(context, sizes, fleets["kv-aware"].engines, ladder.knee)
    return build_report(sizes, ladder, comparisons, no_reuse, cpu_shares)


async def _start(stack: AsyncExitStack, context: BenchContext, sizes: Sizes, policy: str) -> _Fleet:
    spec = sim_engine(
        *("--num-gpu-blocks-override", str(sizes.blocks_per_engine)),
        *("--sim-prefill-tokens-per-s", str(sizes.prefill_tokens_per_s)),
        *("--sim-base-s", str(sizes.step_s)),
        *("--sim-context-token-s", str(sizes.context_token_s)),
    )
    fleet = await stack.enter_async_context(engines([spec] * sizes.num_engines, context))
    entries = [engine.router_entry for engine in fleet]
    front = await stack.enter_async_context(router(entries, policy, context))
    client = await stack.enter_async_context(Client(front.url))
    return _Fleet(client, front.child, fleet)


def _requests(prompts: Iterator[list[int]], sizes: Sizes, model: str) -> Iterator[Request]:
    for prompt in prompts:
        yield completion(model, prompt, sizes.shape.output_tokens)


async def _warm(fleet: _Fleet, sizes: Sizes, prompts: list[list[int]], model: str) -> None:
    order = islice(shuffled_forever(prompts, seed=0), len(prompts))
    requests = (completion(model, prompt, 1) for prompt in order)
    await run_closed_loop(fleet.client, requests, sizes.warm_users)


async def _offer(
    fleet: _Fleet,
    requests: Iterator[Request],
    offsets: Sequence[float],
    seconds: float,
    drain_s: float = 0.0,
) -> LoadRun:
    """Open-loop load; what has not ended by the end is cut, and the engines are left to go idle.

    First tokens are awaited for `drain_s` longer.
    """
    ready = list(islice(requests, len(offsets)))
    pids = [engine.child.pid for engine in fleet.engines]
    router_before = tree_cpu_seconds(fleet.router.pid)
    engines_before = sum(map(tree_cpu_seconds, pids))
    began_s = time.perf_counter()
    load = await run_open_loop(fleet.client, iter(ready), offsets, seconds, drain_s)
    took_s = time.perf_counter() - began_s
    router_s = tree_cpu_seconds(fleet.router.pid) - router_before
    engines_s = sum(map(tree_cpu_seconds, pids)) - engines_before
    fleet.cpu_shares.append((router_s / took_s, engines_s / took_s, load.generator_cpu_share))
    await asyncio.sleep(1.0)
    return load


async def _find_knee(
    context: BenchContext, sizes: Sizes, fleet: _Fleet, prompts: list[list[int]]
) -> Ladder:
    seeds = count(1)

    async def ttft_p90_s(rate: float) -> float:
        seed, seconds = next(seeds), sizes.ramp_s + sizes.window_s
        requests = _requests(shuffled_forever(prompts, seed), sizes, context.served_name)
        offsets = poisson_offsets(rate, seconds, seed)
        load = await _offer(fleet, requests, offsets, seconds, sizes.drain_s)
        figures = summarise(load.outcomes, load.start_s + sizes.ramp_s, load.end_s)
        context.say(f"round-robin at {rate:.2f} requests/s: TTFT p90 {figures.ttft_p90_s:.2f} s")
        return figures.ttft_p90_s

    return await climb(
        ttft_p90_s,
        sizes.bound_s,
        sizes.start_rate,
        _LADDER_FACTOR,
        sizes.num_refinements,
        sizes.max_rungs,
    )


async def _compare(
    context: BenchContext,
    sizes: Sizes,
    fleets: dict[str, _Fleet],
    prompts: list[list[int]],
    knee: float,
    offered: Offered,
) -> Comparison:
    """Both policies in turn at a multiple of the knee, with the same prompts at the same times."""
    rate, seconds = offered.factor * knee, offered.ramp_s + offered.window_s
    figures: dict[str, list[LoadFigures]] = {policy: [] for policy in POLICIES}
    for repeat in range(context.repeats):
        context.say(f"{offered.factor:g} × knee ({rate:.2f} requests/s), repeat {repeat + 1}")
        offsets = poisson_offsets(rate, seconds, _COMPARISON_SEED + repeat)
        for policy in POLICIES:
            order = shuffled_forever(prompts, _COMPARISON_SEED + repeat)
            requests = _requests(order, sizes, context.served_name)
            load = await _offer(fleets[policy], requests, offsets, seconds, offered.drain_s)
            start_s = load.start_s + offered.ramp_s
            figures[policy].append(summarise(load.outcomes, start_s, load.end_s))
    return Comparison(offered, rate, figures)


async def _no_reuse(
    context: BenchContext, sizes: Sizes, fleet: list[Engine], knee: float
) -> NoReuse:
    """Prompts that share nothing, under all four policies in turn, below what the fleet carries."""
    ramp_s = sizes.no_reuse_s / 2
    rate, seconds = sizes.no_reuse_share * knee, ramp_s + sizes.no_reuse_s
    figures: dict[str, list[LoadFigures]] = {policy: [] for policy in NO_REUSE_POLICIES}
    seeds = count(_NO_REUSE_SEED)
    async with AsyncExitStack() as stack:
        fleets: dict[str, _Fleet] = {}
        entries = [engine.router_entry for engine in fleet]
        for policy in NO_REUSE_POLICIES:
            front = await stack.enter_async_context(router(entries, policy, context))
            client = await stack.enter_async_context(Client(front.url))
            fleets[policy] = _Fleet(client, front.child, fleet)
        for repeat in range(context.repeats):
            context.say(f"no-reuse at {rate:.2f} requests/s, repeat {repeat + 1}")
            offsets = poisson_offsets(rate, seconds, _NO_REUSE_SEED + repeat)
            for policy in NO_REUSE_POLICIES:
                prompts = short_prompts(len(offsets), sizes.shape.prompt_tokens, next(seeds))
                requests = _requests(iter(prompts), sizes, context.served_name)
                load = await _offer(fleets[policy], requests, offsets, seconds, sizes.drain_s)
                start_s = load.start_s + ramp_s
                figures[policy].append(summarise(load.outcomes, start_s, load.end_s))
    return NoReuse(rate, figures)
