"""`kvoy bench shared-prefix`: many groups of five questions on eight simulated engines.

The published workload (150 groups, 6,000 + 1,200 + 1,000 tokens, 307,328 KV tokens per engine),
all sizes a tenth, so that two cores carry it: the ratios between prefix, question, output and KV
stay. As there, traffic draws from the same 750 prompts for ever, each pass in a new random
order. Both policies have a fleet of their own, warmed by one pass, and are measured in turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.knee import Ladder, climb
from kvoy_cli.bench.load import LoadRun, run_closed_loop, run_open_loop
from kvoy_cli.bench.outcome import LoadFigures, summarise
from kvoy_cli.bench.processes import Child, tree_cpu_seconds
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
_SMOKE = Sizes(
    shape=SharedPrefixShape(4, 2, 48, 16, 4),
    num_engines=2,
    ramp_s=0.2,
    window_s=0.5,
    backlog_s=0.5,
    drain_s=2.0,
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
    requests: Iterator[Request]
    seed: int = 0
    cpu_shares: list[tuple[float, float, float]] = field(default_factory=list)
    """(router, all engines, load generator) per run, of one core each."""

    def next_seed(self) -> int:
        self.seed += 1
        return self.seed


async def run(context: BenchContext) -> Report:
    sizes = _SMOKE if context.is_smoke else Sizes()
    prompts = shared_prefix_prompts(sizes.shape, seed=1)
    async with AsyncExitStack() as stack:
        fleets: dict[str, _Fleet] = {}
        for policy in POLICIES:
            context.say(f"starting {sizes.num_engines} simulated engines and a {policy} router")
            fleets[policy] = await _start(stack, context, sizes, policy, prompts)
        for policy, fleet in fleets.items():
            context.say(f"warming the {policy} fleet: every prompt once")
            await _warm(fleet, sizes, prompts, context.served_name)
        ladder = await _find_knee(context, sizes, fleets["round-robin"])
        comparisons = [
            await _compare(context, sizes, fleets, ladder.knee, offered)
            for offered in (
                Offered(1.5, 0.0, sizes.backlog_s, sizes.drain_s),
                Offered(3.0, sizes.ramp_s, sizes.window_s, 0.0),
            )
        ]
        cpu_shares = [share for fleet in fleets.values() for share in fleet.cpu_shares]
        no_reuse = await _no_reuse(context, sizes, fleets["kv-aware"].engines, ladder.knee)
    return build_report(sizes, ladder, comparisons, no_reuse, cpu_shares)


async def _start(
    stack: AsyncExitStack,
    context: BenchContext,
    sizes: Sizes,
    policy: str,
    prompts: list[list[int]],
) -> _Fleet:
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
    order = shuffled_forever(prompts, seed=2)
    requests = _requests(order, sizes, context.served_name)
    return _Fleet(client, front.child, fleet, requests)


def _requests(prompts: Iterator[list[int]], sizes: Sizes, model: str) -> Iterator[Request]:
    for prompt in prompts:
        yield completion(model, prompt, sizes.shape.output_tokens)


async def _warm(fleet: _Fleet, sizes: Sizes, prompts: list[list[int]], model: str) -> None:
    order = next_pass(prompts)
    requests = (completion(model, prompt, 1) for prompt in order)
    await run_closed_loop(fleet.client, requests, sizes.warm_users)


def next_pass(prompts: list[list[int]]) -> list[list[int]]:
    forever = shuffled_forever(prompts, seed=3)
    return [next(forever) for _ in prompts]


async def _offer(fleet: _Fleet, rate: float, seconds: float, drain_s: float = 0.0) -> LoadRun:
    """Open-loop load; what has not ended by the end is cut, and the engines are left to go idle.

    First tokens are awaited for `drain_s` longer.
    """
    offsets = poisson_offsets(rate, seconds, fleet.next_seed())
    requests = [next(fleet.requests) for _ in offsets]
    pids = [engine.child.pid for engine in fleet.engines]
    router_before = tree_cpu_seconds(fleet.router.pid)
    engines_before = sum(map(tree_cpu_seconds, pids))
    began_s = time.perf_counter()
    load = await run_open_loop(fleet.client, iter(requests), offsets, seconds, drain_s)
    took_s = time.perf_counter() - began_s
    router_s = tree_cpu_seconds(fleet.router.pid) - router_before
    engines_s = sum(map(tree_cpu_seconds, pids)) - engines_before
    fleet.cpu_shares.append((router_s / took_s, engines_s / took_s, load.generator_cpu_share))
    await asyncio.sleep(1.0)
    return load


async def _find_knee(context: BenchContext, sizes: Sizes, fleet: _Fleet) -> Ladder:
    async def ttft_p90_s(rate: float) -> float:
        load = await _offer(fleet, rate, sizes.ramp_s + sizes.window_s, sizes.drain_s)
        figures = summarise(load.outcomes, load.start_s + sizes.ramp_s, load.end_s)
        context.say(f"round-robin at {rate:.2f} requests/s: TTFT p90 {figures.ttft_p90_s:.2f} s")
        return figures.ttft_p90_s

    return await climb(
        ttft_p90_s,
        sizes.bound_s,
        sizes.start_rate,
        1.3,
        sizes.num_refinements,
        sizes.max_rungs,
    )


async def _compare(
    context: BenchContext,
    sizes: Sizes,
    fleets: dict[str, _Fleet],
    knee: float,
    offered: Offered,
) -> Comparison:
    """Both policies in turn at a multiple of the knee; figures of the window after the ramp."""
    rate = offered.factor * knee
    figures: dict[str, list[LoadFigures]] = {policy: [] for policy in POLICIES}
    for repeat in range(context.repeats):
        context.say(f"{offered.factor:g} × knee ({rate:.2f} requests/s), repeat {repeat + 1}")
        for policy in POLICIES:
            seconds = offered.ramp_s + offered.window_s
            load = await _offer(fleets[policy], rate, seconds, offered.drain_s)
            figures[policy].append(
                summarise(load.outcomes, load.start_s + offered.ramp_s, load.end_s)
            )
    return Comparison(offered, rate, figures)


async def _no_reuse(
    context: BenchContext, sizes: Sizes, fleet: list[Engine], knee: float
) -> NoReuse:
    """Prompts that share nothing, under all four policies in turn, below what the fleet carries."""
    rate = sizes.no_reuse_share * knee
    figures: dict[str, list[LoadFigures]] = {policy: [] for policy in NO_REUSE_POLICIES}
    async with AsyncExitStack() as stack:
        fleets: dict[str, _Fleet] = {}
        entries = [engine.router_entry for engine in fleet]
        for index, policy in enumerate(NO_REUSE_POLICIES):
            front = await stack.enter_async_context(router(entries, policy, context))
            client = await stack.enter_async_context(Client(front.url))
            count = int(2 * rate * (sizes.ramp_s + sizes.window_s) * context.repeats) + 100
            prompts = short_prompts(count, sizes.shape.prompt_tokens, 100 + index)
            requests = _requests(iter(prompts), sizes, context.served_name)
            # The same arrivals for all policies: only where requests go differs.
            fleets[policy] = _Fleet(client, front.child, fleet, requests, seed=500)
        for repeat in range(context.repeats):
            context.say(f"no-reuse at {rate:.2f} requests/s, repeat {repeat + 1}")
            for policy in NO_REUSE_POLICIES:
                seconds = sizes.ramp_s + sizes.window_s
                load = await _offer(fleets[policy], rate, seconds, sizes.drain_s)
                start_s = load.start_s + sizes.ramp_s
                figures[policy].append(summarise(load.outcomes, start_s, load.end_s))
    return NoReuse(rate, figures)
