"""`kvoy bench run`: a named workload on any OpenAI endpoint, open loop (--rate) or closed
(--concurrency)."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.config import RunConfig
from kvoy_cli.bench.event_loop import run
from kvoy_cli.bench.goals import number
from kvoy_cli.bench.load import LoadRun, run_closed_loop, run_open_loop
from kvoy_cli.bench.outcome import LoadFigures, Outcome, summarise
from kvoy_cli.bench.processes import BenchError
from kvoy_cli.bench.request import Request, chat, completion
from kvoy_cli.bench.schedule import poisson_offsets
from kvoy_cli.bench.workloads import (
    SharedPrefixShape,
    chat_script,
    random_ids,
    shared_prefix_prompts,
    shuffled_forever,
)
from kvoy_contract.settings import read_settings

_DESCRIPTION = (
    "Load on an OpenAI endpoint that runs already. Times are the client's; a request that never "
    "answered counts with an endless time to first token."
)
_HTTP_TIMEOUT_S = 10.0
_DRAIN_S = 60.0
_NUM_GROUPS = 40
_CHAT_TURNS = 10


def main(argv: Sequence[str]) -> int:
    config = read_settings(RunConfig, "kvoy bench run", _DESCRIPTION, list(argv))
    console = Console(stderr=True)
    try:
        load = run(_run(config))
    except (BenchError, httpx.HTTPError, OSError) as error:
        console.print(f"kvoy bench run: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    figures = summarise(load.outcomes, load.start_s, load.end_s)
    if config.json:
        sys.stdout.write(to_json(figures, load).decode() + "\n")
    else:
        _print(Console(), config, figures, load)
    return 0 if figures.num_ok else 1


def base_url(url: str) -> str:
    """Without a trailing `/v1`, which every path brings along."""
    return url.rstrip("/").removesuffix("/v1")


def engines_of(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many requests each engine answered, where a router says so."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.engine:
            counts[outcome.engine] = counts.get(outcome.engine, 0) + 1
    return dict(sorted(counts.items()))


def prompts_of(config: RunConfig) -> Iterator[list[int]]:
    """Prompts of the workload for ever, as token ids."""
    if config.workload == "shared-prefix":
        shape = SharedPrefixShape(
            num_groups=_NUM_GROUPS,
            prefix_tokens=5 * config.prompt_tokens,
            question_tokens=config.prompt_tokens,
        )
        yield from shuffled_forever(shared_prefix_prompts(shape, config.seed), config.seed)
    rng = random.Random(f"run-{config.seed}")
    while True:
        yield random_ids(rng, config.prompt_tokens)


async def _run(config: RunConfig) -> LoadRun:
    url = base_url(config.url)
    model = config.served_model or await _first_model(url)
    extra: dict[str, Any] = {"ignore_eos": True if config.ignore_eos else None}
    async with Client(url) as client:
        if config.workload == "conversation":
            return await _chats(client, config, model, extra)
        requests = (
            completion(model, prompt, config.output_tokens, **extra)
            for prompt in prompts_of(config)
        )
        if config.rate is not None:
            offsets = poisson_offsets(config.rate, config.duration, config.seed)
            ready: list[Request] = [next(requests) for _ in offsets]
            return await run_open_loop(client, iter(ready), offsets, config.duration, _DRAIN_S)
        return await run_closed_loop(client, requests, config.concurrency or 1, config.duration)


async def _first_model(url: str) -> str:
    async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S) as client:
        answer = await client.get(f"{url}/v1/models")
    answer.raise_for_status()
    models = answer.json()["data"]
    if not models:
        raise BenchError(f"{url} serves no model; name one with --served-model")
    return str(models[0]["id"])


async def _chats(client: Client, config: RunConfig, model: str, extra: dict[str, Any]) -> LoadRun:
    """Users who chat: after ten turns each begins a new chat."""
    cpu_before = time.process_time()
    start_s = time.perf_counter()
    outcomes: list[Outcome] = []

    async def user(index: int) -> None:
        seed = config.seed * 1_000_003 + index
        while True:
            script = chat_script(_CHAT_TURNS, config.prompt_tokens, seed)
            seed += 1000
            messages = [{"role": "system", "content": script.system}]
            for turn in script.turns:
                messages.append({"role": "user", "content": turn})
                outcome = Outcome(due_s=time.perf_counter())
                outcomes.append(outcome)
                await client.send(chat(model, messages, config.output_tokens, **extra), outcome)
                if not outcome.is_ok:
                    await asyncio.sleep(1.0)
                    break
                messages.append({"role": "assistant", "content": outcome.text})

    users = [asyncio.ensure_future(user(index)) for index in range(config.concurrency or 1)]
    await asyncio.wait(users, timeout=config.duration)
    for task in users:
        task.cancel()
    await asyncio.gather(*users, return_exceptions=True)
    end_s = time.perf_counter()
    return LoadRun(outcomes, start_s, end_s, (time.process_time() - cpu_before) / (end_s - start_s))


def to_json(figures: LoadFigures, load: LoadRun) -> bytes:
    value = {
        **msgspec.to_builtins(figures),
        "generator_cpu_share": load.generator_cpu_share,
        "requests_by_engine": engines_of(load.outcomes),
        "errors": error_counts(load.outcomes),
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def error_counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            counts[outcome.error] = counts.get(outcome.error, 0) + 1
    return counts


def _print(console: Console, config: RunConfig, figures: LoadFigures, load: LoadRun) -> None:
    how = f"{config.rate:g} requests/s" if config.rate else f"{config.concurrency} users"
    table = Table(title=f"{config.workload}: {how}, {config.duration:g} s", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in _lines(figures, load):
        table.add_row(name, value)
    console.print(table)
    for engine, count in engines_of(load.outcomes).items():
        console.print(f"· {engine} answered {count}", style="dim", highlight=False)
    for error, count in error_counts(load.outcomes).items():
        console.print(f"· {count} × {error}", style="red", markup=False, highlight=False)


def _lines(figures: LoadFigures, load: LoadRun) -> Iterator[tuple[str, str]]:
    f = figures
    yield "requests (ended well, failed, cut)", f"{f.num_ok}, {f.num_errors}, {f.num_cut}"
    yield "requests/s that ended well", number(f.requests_per_s)
    yield "output tokens/s", number(f.output_tokens_per_s)
    for name, seconds in (
        ("TTFT p50", f.ttft_p50_s),
        ("TTFT p90", f.ttft_p90_s),
        ("TTFT p99", f.ttft_p99_s),
        ("time per output token", f.tpot_mean_s),
        ("end to end p50", f.e2e_p50_s),
        ("sent late p99", f.lateness_p99_s),
    ):
        yield f"{name}, ms", number(1000 * seconds)
    if not math.isnan(f.hit_share):
        yield "prompt tokens from cache, %", number(100 * f.hit_share)
    yield "load generator, % of one core", number(100 * load.generator_cpu_share)
