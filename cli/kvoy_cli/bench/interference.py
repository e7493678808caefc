"""`kvoy bench interference`: eight users stream, then a long prompt comes.

On one engine: how long the users' gaps become while it is prefilled, and what the prompt itself
pays for sparing them. On a fleet of two: whether the router sends it to the engine that is not
busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.outcome import Outcome
from kvoy_cli.bench.processes import BenchError
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.request import completion
from kvoy_cli.bench.stack import engines, router, settle, torch_engine
from kvoy_cli.bench.stats import Spread, median, paired_ratios, percentile
from kvoy_cli.bench.workloads import short_prompts

_NUM_USERS = 8
_POLL_S = 0.02
_STREAMING_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Sizes:
    user_prompt_tokens: int = 32
    user_max_tokens: int = 4000
    long_prompt_tokens: int = 4096
    before_s: float = 4.0
    """How long the users stream undisturbed, for the gap to compare with."""


@dataclass(frozen=True, slots=True)
class Round:
    """One long prompt, once alone and once beside the users; seconds."""

    alone_ttft_s: float
    ttft_s: float
    median_gap_before_s: float
    p99_gap_during_s: float
    max_gap_during_s: float

    @property
    def gap_ratio(self) -> float:
        return self.p99_gap_during_s / self.median_gap_before_s


@dataclass(frozen=True, slots=True)
class FleetRound:
    went_to: str
    busy: str
    ttft_s: float

    @property
    def was_spared(self) -> bool:
        return self.went_to != self.busy


async def run(context: BenchContext) -> Report:
    sizes = _Sizes(8, 200, 300, 0.5) if context.is_smoke else _Sizes()
    folder = context.model_folder()
    one = torch_engine(folder, 1)
    async with engines([one], context) as (engine,), Client(engine.url) as client:
        await client.send(completion(context.served_name, short_prompts(1, 64, 0)[0], 8))
        rounds: list[Round] = []
        for repeat in range(context.repeats):
            context.say(f"round {repeat + 1} of {context.repeats} on one engine")
            rounds.append(await _round(client, sizes, repeat, context.served_name))
    fleet_rounds = await _fleet(context, sizes)
    return build_report(rounds, fleet_rounds, sizes, one.num_threads or 0)


async def _round(client: Client, sizes: _Sizes, repeat: int, model: str) -> Round:
    alone, beside = short_prompts(2, sizes.long_prompt_tokens, 7000 + repeat)
    alone_outcome = await _send_long(client, model, alone)
    async with streaming_users(client, sizes, 8000 + repeat, model) as users:
        before_start_s = time.perf_counter()
        await asyncio.sleep(sizes.before_s)
        sent_s = time.perf_counter()
        before = [gap for user in users for gap in user.gaps_between(before_start_s, sent_s)]
        outcome = await _send_long(client, model, beside)
        first_s = outcome.arrivals[0]
        during = [gap for user in users for gap in user.gaps_between(sent_s, first_s)]
        ended = [user for user in users if user.error is not None or user.finish_reason]
    await settle(1.0)
    if ended:
        raise BenchError(f"{len(ended)} users stopped streaming before the long prompt was done")
    return Round(
        alone_ttft_s=alone_outcome.ttft_s,
        ttft_s=outcome.ttft_s,
        median_gap_before_s=median(before),
        p99_gap_during_s=percentile(during, 99),
        max_gap_during_s=max(during),
    )


async def _fleet(context: BenchContext, sizes: _Sizes) -> list[FleetRound]:
    """Users go straight to one engine, in turn each; the long prompt goes through the router."""
    spec = torch_engine(context.model_folder(), 2)
    rounds: list[FleetRound] = []
    async with AsyncExitStack() as stack:
        context.say("starting two engines and a router")
        fleet = await stack.enter_async_context(engines([spec] * 2, context))
        entries = [engine.router_entry for engine in fleet]
        front = await stack.enter_async_context(router(entries, "kv-aware", context))
        client = await stack.enter_async_context(Client(front.url))
        direct = [await stack.enter_async_context(Client(engine.url)) for engine in fleet]
        for prompt in short_prompts(4, 64, 1):  # both engines measure themselves before they count
            for one in direct:
                await one.send(completion(context.served_name, prompt, 8))
        for repeat in range(context.repeats):
            busy = repeat % 2
            context.say(f"fleet round {repeat + 1} of {context.repeats}")
            (prompt,) = short_prompts(1, sizes.long_prompt_tokens, 9000 + repeat)
            users = streaming_users(direct[busy], sizes, 9500 + repeat, context.served_name)
            async with users:
                await settle(1.0)
                outcome = await _send_long(client, context.served_name, prompt)
            rounds.append(FleetRound(outcome.engine, fleet[busy].address, outcome.ttft_s))
            await settle(1.0)
    return rounds


@asynccontextmanager
async def streaming_users(
    client: Client, sizes: _Sizes, seed: int, model: str
) -> AsyncIterator[list[Outcome]]:
    """Eight streams that all have begun; they go away as clients when the block ends."""
    prompts = short_prompts(_NUM_USERS, sizes.user_prompt_tokens, seed)
    outcomes = [Outcome(due_s=time.perf_counter()) for _ in prompts]
    tasks = [
        asyncio.ensure_future(
            client.send(completion(model, prompt, sizes.user_max_tokens), outcome)
        )
        for prompt, outcome in zip(prompts, outcomes, strict=True)
    ]
    try:
        async with asyncio.timeout(_STREAMING_LIMIT_S):
            while any(len(outcome.arrivals) < 2 for outcome in outcomes):
                failed = [outcome.error for outcome in outcomes if outcome.error is not None]
                if failed:
                    raise BenchError(f"a streaming user failed: {failed[0]}")
                await asyncio.sleep(_POLL_S)
        yield outcomes
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _send_long(client: Client, model: str, prompt: list[int]) -> Outcome:
    outcome = await client.send(completion(model, prompt, 1))
    if not outcome.is_ok or not outcome.arrivals:
        raise BenchError(f"the long prompt failed: {outcome.error or 'no text came'}")
    return outcome


def build_report(
    rounds: list[Round], fleet: list[FleetRound], sizes: _Sizes, num_threads: int
) -> Report:
    gap_ratios = [r.gap_ratio for r in rounds]
    ttft_ratios = paired_ratios([r.ttft_s for r in rounds], [r.alone_ttft_s for r in rounds])
    spared = sum(r.was_spared for r in fleet)
    rows = tuple(
        (
            index + 1,
            1000 * r.median_gap_before_s,
            1000 * r.p99_gap_during_s,
            1000 * r.max_gap_during_s,
            r.gap_ratio,
            1000 * r.alone_ttft_s,
            1000 * r.ttft_s,
            ttft_ratios[index],
        )
        for index, r in enumerate(rounds)
    )
    columns: tuple[str, ...] = (
        "round",
        "gap before ms",
        "gap p99 during",
        "gap max during",
        "p99 ÷ before",
    )
    columns += ("TTFT alone ms", "TTFT beside users", "beside ÷ alone")
    return Report(
        name="interference",
        setting=f"one engine of {num_threads} threads, {_NUM_USERS} users streaming, then a "
        f"prompt of {sizes.long_prompt_tokens:,} tokens; {len(rounds)} rounds; then two "
        f"engines behind the router, the users on one of them, {len(fleet)} rounds",
        tables=(
            Table("One engine", columns, rows),
            Table(
                "Fleet of two",
                ("round", "busy engine", "long prompt went to", "TTFT ms"),
                tuple((i + 1, r.busy, r.went_to, 1000 * r.ttft_s) for i, r in enumerate(fleet)),
            ),
        ),
        goals=(
            Goal(
                "p99 gap during the long prefill ÷ median gap before",
                median(gap_ratios),
                "<=",
                3.0,
                " ×",
            ),
            Goal(
                "TTFT of the long prompt beside users ÷ alone", median(ttft_ratios), "<=", 2.5, " ×"
            ),
            Goal(
                "share of long prompts sent to the engine that is not busy",
                spared / len(fleet),
                ">=",
                1.0,
            ),
        ),
        notes=(
            f"gap ratio {Spread.of(gap_ratios).text()}, TTFT ratio {Spread.of(ttft_ratios).text()}",
        ),
        figures={
            "gap_before_ms": 1000 * median(r.median_gap_before_s for r in rounds),
            "gap_p99_during_ms": 1000 * median(r.p99_gap_during_s for r in rounds),
            "ttft_alone_ms": 1000 * median(r.alone_ttft_s for r in rounds),
            "ttft_beside_ms": 1000 * median(r.ttft_s for r in rounds),
        },
    )
