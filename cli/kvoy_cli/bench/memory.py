"""`kvoy bench memory`: what an engine takes, and how many users of which context fit.

Every figure is printed with how it comes about, and checked: bytes per KV block against the model's
shape and against what the process grows by, and the number of users that fit against a run with
exactly so many and one with one more.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.load import run_closed_loop
from kvoy_cli.bench.memory_report import (
    Fit,
    Footprint,
    ModelShape,
    Sizes,
    blocks_needed,
    build_report,
    most_at_once,
    users_that_fit,
)
from kvoy_cli.bench.processes import BenchError, resident_bytes
from kvoy_cli.bench.report import Report
from kvoy_cli.bench.request import completion
from kvoy_cli.bench.stack import EngineSpec, engines, settle, sim_engine, torch_engine
from kvoy_cli.bench.telemetry_view import describe, read_load
from kvoy_cli.bench.workloads import short_prompts

_SMOKE = Sizes(pools=(16, 32), fill_prompt_tokens=200, fit_blocks=24, fit_context=64)


async def run(context: BenchContext) -> Report:
    sizes = _SMOKE if context.is_smoke else Sizes()
    folder = context.model_folder()
    context.say("starting engines one after the other")
    sim = await _footprint("simulated", sim_engine(), 0, sizes, context)
    pools = [
        await _footprint(
            "torch",
            torch_engine(folder, 1, "--num-gpu-blocks-override", str(num_blocks)),
            num_blocks,
            sizes,
            context,
        )
        for num_blocks in sizes.pools
    ]
    default = await _footprint("torch, default pool", torch_engine(folder, 1), 0, sizes, context)
    fits = [await _check_fit(sizes, extra, context) for extra in (0, 1)]
    return build_report(_read_shape(folder), sizes, sim, pools, default, fits)


async def _footprint(
    name: str, spec: EngineSpec, fill_blocks: int, sizes: Sizes, context: BenchContext
) -> Footprint:
    """Start one engine; read its memory idle and after `fill_blocks` blocks have been written."""
    began_s = time.perf_counter()
    async with engines([spec], context) as (engine,), Client(engine.url) as client:
        start_s = time.perf_counter() - began_s
        description = await describe(engine.telemetry_port, context.secret)
        await _send_all(client, context, [16], seed=1)
        await settle(0.5)
        idle = resident_bytes(engine.child.pid)
        await _fill(client, context, fill_blocks * description.block_size, sizes)
        await settle(0.5)
        filled = resident_bytes(engine.child.pid)
    return Footprint(
        name=name,
        start_s=start_s,
        idle_bytes=idle,
        filled_bytes=filled,
        num_blocks=int(description.num_blocks),
        block_size=int(description.block_size),
        block_bytes=int(description.block_bytes),
        max_num_seqs=int(description.max_num_seqs),
        max_model_len=int(description.max_model_len),
    )


async def _fill(client: Client, context: BenchContext, num_tokens: int, sizes: Sizes) -> None:
    """Prompts that share nothing, `num_tokens` in all: each leaves its blocks in the cache."""
    whole, rest = divmod(num_tokens, sizes.fill_prompt_tokens)
    lengths = [sizes.fill_prompt_tokens] * whole + [rest] * (rest > 1)
    await _send_all(client, context, lengths, seed=2)


async def _send_all(client: Client, context: BenchContext, lengths: list[int], seed: int) -> None:
    for index, length in enumerate(lengths):
        (prompt,) = short_prompts(1, length, 1000 * seed + index)
        outcome = await client.send(completion(context.served_name, prompt, 1))
        if not outcome.is_ok:
            raise BenchError(f"a prompt of {length} tokens failed: {outcome.error}")


async def _check_fit(sizes: Sizes, extra_users: int, context: BenchContext) -> Fit:
    """As many users as should fit, plus `extra_users`, on the real pool under the timing model."""
    spec = sim_engine(
        *("--num-gpu-blocks-override", str(sizes.fit_blocks)),
        *("--sim-base-s", "0.02", "--sim-prefill-tokens-per-s", "100000"),
    )
    predicted = users_that_fit(sizes.fit_blocks, sizes.block_size, sizes.fit_context)
    num_users = predicted + extra_users
    # Half of each context is answer: at first all prompts fit easily, at last every block is taken.
    # The last token of an answer is never stored, so the answer is one token longer.
    prompt_tokens = sizes.fit_context // 2
    answer_tokens = sizes.fit_context - prompt_tokens + 1
    prompts = short_prompts(num_users, prompt_tokens, 77)
    async with engines([spec], context) as (engine,), Client(engine.url) as client:
        requests = [completion(context.served_name, prompt, answer_tokens) for prompt in prompts]
        load = await run_closed_loop(client, iter(requests), num_users)
        report = await read_load(engine.telemetry_port, context.secret)
    failed = [outcome.error for outcome in load.outcomes if not outcome.is_ok]
    if failed:
        raise BenchError(f"a user of the fit check failed: {failed[0]}")
    return Fit(
        num_users=num_users,
        predicted=predicted,
        blocks_per_user=blocks_needed(sizes.fit_context, sizes.block_size),
        ran_at_once=most_at_once([(o.arrivals[0], o.arrivals[-1]) for o in load.outcomes]),
        num_preemptions=int(report.num_preemptions),
    )


def _read_shape(folder: Path) -> ModelShape:
    config = json.loads((folder / "config.json").read_text())
    heads = int(config["num_attention_heads"])
    return ModelShape(
        num_layers=int(config["num_hidden_layers"]),
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
    )
