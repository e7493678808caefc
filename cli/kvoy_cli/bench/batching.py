"""`kvoy bench batching`: one engine with 1, 8 and 32 users, and transformers' `generate` beside
one.

Every user sends one request and waits; all prompts differ. A round measures all sizes and the
baseline one after the other, and ratios are taken within a round, so that a slow minute of the
machine hits all.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.load import run_closed_loop
from kvoy_cli.bench.machine import usable_cores
from kvoy_cli.bench.processes import BenchError
from kvoy_cli.bench.report import Cell, Report, Table
from kvoy_cli.bench.request import completion
from kvoy_cli.bench.stack import engines, torch_engine
from kvoy_cli.bench.stats import Spread, median, paired_ratios, percentile
from kvoy_cli.bench.transformers_child import transformers
from kvoy_cli.bench.workloads import short_prompts

_USERS = (1, 8, 32)
_GOALS = {8: 3.0, 32: 5.0}
_GENERATE_GOAL = 1.5


@dataclass(frozen=True, slots=True)
class _Sizes:
    prompt_tokens: int = 32
    output_tokens: int = 128
    requests_of_one_user: int = 2


@dataclass(slots=True)
class Rounds:
    """Output tokens per second, one entry per round; and what the users saw."""

    by_users: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in _USERS})
    generate: list[float] = field(default_factory=list)
    gaps_s: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in _USERS})
    ttfts_s: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in _USERS})
    generator_cpu: list[float] = field(default_factory=list)


async def run(context: BenchContext) -> Report:
    sizes = _Sizes(8, 4, 1) if context.is_smoke else _Sizes()
    folder = context.model_folder()
    spec = torch_engine(folder, 1)
    rounds = Rounds()
    async with AsyncExitStack() as stack:
        context.say("starting one engine, and transformers in float32")
        (engine,) = await stack.enter_async_context(engines([spec], context))
        client = await stack.enter_async_context(Client(engine.url))
        baseline = await stack.enter_async_context(
            transformers(folder, "float32", usable_cores(), context.logs)
        )
        await _measure(client, sizes, 8, -1, context.served_name, Rounds())
        await baseline.generate(short_prompts(1, sizes.prompt_tokens, -1)[0], 8)
        for repeat in range(context.repeats):
            context.say(f"round {repeat + 1} of {context.repeats}")
            for num_users in _USERS:
                await _measure(client, sizes, num_users, repeat, context.served_name, rounds)
            (prompt,) = short_prompts(1, sizes.prompt_tokens, 100 * repeat + 99)
            generated = await baseline.generate(prompt, sizes.output_tokens)
            rounds.generate.append(sizes.output_tokens / generated.seconds)
    return build_report(rounds, sizes, spec.num_threads or 0)


async def _measure(
    client: Client, sizes: _Sizes, num_users: int, repeat: int, model: str, rounds: Rounds
) -> None:
    count = sizes.requests_of_one_user if num_users == 1 else num_users
    prompts = short_prompts(count, sizes.prompt_tokens, 100 * repeat + num_users)
    requests = [completion(model, prompt, sizes.output_tokens) for prompt in prompts]
    load = await run_closed_loop(client, iter(requests), num_users)
    for outcome in load.outcomes:
        if not outcome.is_ok:
            raise BenchError(f"a request of {num_users} users failed: {outcome.error}")
        rounds.gaps_s[num_users].extend(outcome.gaps_s)
        rounds.ttfts_s[num_users].append(outcome.ttft_s)
    tokens = sum(outcome.completion_tokens for outcome in load.outcomes)
    rounds.by_users[num_users].append(tokens / (load.end_s - load.start_s))
    rounds.generator_cpu.append(load.generator_cpu_share)


def build_report(rounds: Rounds, sizes: _Sizes, num_threads: int) -> Report:
    one = rounds.by_users[1]
    ratios = {n: paired_ratios(rounds.by_users[n], one) for n in _GOALS}
    against_generate = paired_ratios(one, rounds.generate)
    rows: list[tuple[Cell, ...]] = [
        (
            f"Kvoy, {n} user{'s' if n > 1 else ''}",
            Spread.of(rounds.by_users[n]).text(1),
            Spread.of(paired_ratios(rounds.by_users[n], one)).text(),
            Spread.of(paired_ratios(rounds.by_users[n], rounds.generate)).text(),
            1000 * median(rounds.ttfts_s[n]),
            1000 * median(rounds.gaps_s[n]),
            1000 * percentile(rounds.gaps_s[n], 99),
        )
        for n in _USERS
    ]
    rows.append(
        ("transformers generate, float32", Spread.of(rounds.generate).text(1), "", "", "", "", "")
    )
    columns = (
        "who",
        "output tokens/s",
        "÷ one user",
        "÷ generate",
        "TTFT ms",
        "gap ms",
        "gap p99 ms",
    )
    return Report(
        name="batching",
        setting=f"one engine of {num_threads} threads, prompts of {sizes.prompt_tokens} and "
        f"answers of {sizes.output_tokens} tokens, {len(one)} rounds; tokens/s over the "
        "whole time of all requests, prefill included",
        tables=(Table("Throughput: median (least–greatest)", columns, tuple(rows)),),
        goals=(
            *(
                Goal(
                    f"output tokens/s of {n} users ÷ one user", median(ratios[n]), ">=", bound, " ×"
                )
                for n, bound in _GOALS.items()
            ),
            Goal(
                "one user ÷ transformers generate (float32)",
                median(against_generate),
                ">=",
                _GENERATE_GOAL,
                " ×",
            ),
        ),
        notes=(f"load generator: {100 * max(rounds.generator_cpu):.1f} % of one core at most",),
        figures={
            **{f"output_tokens_per_s_{n}": median(rounds.by_users[n]) for n in _USERS},
            "output_tokens_per_s_generate": median(rounds.generate),
        },
    )
