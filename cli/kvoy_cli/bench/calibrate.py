"""`kvoy bench calibrate`: how well virtual time tells what happens in real time.

Twice the same requests at the same times, over HTTP and in a simulation. First the real engine,
whose step law is fitted to the steps that it took meanwhile; then simulated engines behind a
router, whose law is known, so that what differs is what the simulation leaves out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kvoy_cli.bench.calibrate_report import Fitted, Pair, Sizes, build_report
from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.load import run_closed_loop, run_open_loop
from kvoy_cli.bench.outcome import LoadFigures, summarise
from kvoy_cli.bench.processes import BenchError
from kvoy_cli.bench.report import Report
from kvoy_cli.bench.request import Request, completion
from kvoy_cli.bench.schedule import poisson_offsets
from kvoy_cli.bench.stack import engines, router, sim_engine, torch_engine
from kvoy_cli.bench.stats import median
from kvoy_cli.bench.step_fit import Observation, StepLaw, fit, fit_sum, windows
from kvoy_cli.bench.workloads import SharedPrefixShape, random_ids, shared_prefix_prompts
from kvoy_engine.core_config import CoreConfig
from kvoy_engine.step_log import read_steps
from kvoy_engine.timing_model import TimingModel
from kvoy_simulate.fleet import run as simulate
from kvoy_simulate.measures import measure
from kvoy_simulate.scenario import EngineGroup, Scenario, Ways
from kvoy_simulate.traffic import PromptSpec, SimRequest, Workload
from kvoy_simulate.workloads import OpenLoop

SMOKE = Sizes(
    prefill_tokens=(16, 32),
    decode_loads=((1, 16), (2, 32)),
    decode_output_tokens=4,
    load_s=1.0,
    load_prompt_tokens=(8, 16),
    load_output_tokens=4,
    num_sim_engines=2,
    sim_rate=8.0,
    sim_warmup_s=0.5,
    sim_load_s=1.0,
    shape=SharedPrefixShape(4, 2, 48, 16, 4),
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request in both worlds."""

    offset_s: float
    prompt_ids: list[int]
    prompt: PromptSpec
    output_tokens: int


async def run(context: BenchContext) -> Report:
    sizes = SMOKE if context.is_smoke else Sizes()
    real = await _real_engine(context, sizes)
    simulated = await simulated_engines(context, sizes)
    return build_report(sizes, real, simulated)


async def _real_engine(context: BenchContext, sizes: Sizes) -> list[Fitted]:
    """A machine is not as fast now as it was a minute ago, so the law of each load is fitted to the
    steps of that load; what it has to tell is how long requests wait for them."""
    core = _core(sizes.num_blocks)
    log = context.logs / "steps.jsonl"
    # Half of the cores: whoever asks and times needs some too, and threads that wait for each other
    # at every operation would make a step as slow as the slowest of them.
    spec = torch_engine(context.model_folder(), 2, *_flags(core), "--step-log", str(log))
    async with AsyncExitStack() as stack:
        context.say("starting one engine")
        (engine,) = await stack.enter_async_context(engines([spec], context))
        client = await stack.enter_async_context(Client(engine.url))
        rate = sizes.load_share * _capacity(fit(await _observe(context, sizes, client)), sizes)
        context.say(f"{sizes.load_s:.0f} s of load at {rate:.2f} requests/s, repeatedly")
        fitted: list[Fitted] = []
        for seed in range(context.repeats):
            overhead_s = await _overhead_s(context, sizes, client, log)
            asked = _independent(sizes, rate, seed)
            begin_s = time.monotonic()
            load = await _offer(client, asked, sizes.load_s, context.served_name)
            steps = [step for step in read_steps(log) if step.begin_s >= begin_s]
            observations = windows(steps)
            law = StepLaw(fit_sum(observations).timing, overhead_s)
            scenario = Scenario(
                engines=(EngineGroup(name="engine", count=1, core=core, step=law.timing),),
                workload=lambda _, asked=asked: _workload(asked),  # type: ignore[misc]
                duration_s=sizes.load_s,
                ways=Ways(client_s=0.0, request_s=overhead_s / 2, telemetry_s=0.001, pick_s=0.0),
            )
            predicted = measure(simulate(scenario, policy="random", seed=seed))
            fitted.append(Fitted(law, Pair(load, predicted), law.errors(observations)))
    return fitted


async def _overhead_s(context: BenchContext, sizes: Sizes, client: Client, log: Path) -> float:
    """What a request on an idle engine takes besides its one step."""
    random = Random("overhead")
    tokens = sizes.prefill_tokens[0]
    times_s: list[float] = []
    for _ in range(context.repeats):
        before = len(read_steps(log))
        ttft_s, _ = await _closed(client, context, random, 1, tokens, 1)
        steps = read_steps(log)[before:]
        times_s.append(ttft_s - sum(step.end_s - step.begin_s for step in steps))
    return max(0.0, median(times_s))


async def simulated_engines(context: BenchContext, sizes: Sizes) -> list[Pair]:
    core = _core(sizes.shape.blocks_per_engine(sizes.num_sim_engines))
    timing = TimingModel(sizes.sim_base_s, sizes.sim_prefill_tokens_per_s, sizes.sim_context_s)
    spec = sim_engine(
        *_flags(core),
        *("--sim-prefill-tokens-per-s", str(timing.prefill_tokens_per_s)),
        *("--sim-base-s", str(timing.base_s)),
        *("--sim-context-token-s", str(timing.context_token_s)),
    )
    total_s = sizes.sim_warmup_s + sizes.sim_load_s
    pairs: list[Pair] = []
    for seed in range(context.repeats):
        context.say(f"{sizes.num_sim_engines} simulated engines and a router, repeat {seed + 1}")
        asked = _shared_prefix(sizes, total_s, seed)
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(
                engines([spec] * sizes.num_sim_engines, context)
            )
            entries = [engine.router_entry for engine in fleet]
            front = await stack.enter_async_context(router(entries, "kv-aware", context))
            client = await stack.enter_async_context(Client(front.url))
            real = await _offer(client, asked, total_s, context.served_name, sizes.sim_warmup_s)
        scenario = Scenario(
            engines=(
                EngineGroup(name="engine", count=sizes.num_sim_engines, core=core, step=timing),
            ),
            workload=lambda _, asked=asked: _workload(asked),  # type: ignore[misc]
            duration_s=total_s,
            warmup_s=sizes.sim_warmup_s,
            drain_s=total_s,
        )
        pairs.append(Pair(real, measure(simulate(scenario, policy="kv-aware", seed=seed))))
    return pairs


async def _observe(context: BenchContext, sizes: Sizes, client: Client) -> list[Observation]:
    """Prefill steps by the time to the first token on an idle engine, decode steps by the gaps
    between tokens; of each the median over the repeats."""
    random = Random("calibrate")
    await _closed(client, context, random, 1, sizes.prefill_tokens[0], 8)
    observations: list[Observation] = []
    for tokens in sizes.prefill_tokens:
        times_s = [
            (await _closed(client, context, random, 1, tokens, 1))[0]
            for _ in range(context.repeats)
        ]
        observations.append(Observation(median(times_s), 1, tokens, tokens, 1, requests=1))
    for num_users, tokens in sizes.decode_loads:
        gaps_s: list[float] = []
        for _ in range(context.repeats):
            _, gap_s = await _closed(
                client, context, random, num_users, tokens, sizes.decode_output_tokens
            )
            gaps_s.append(gap_s)
        length = tokens + sizes.decode_output_tokens / 2
        observations.append(Observation(median(gaps_s), 1, 0, num_users * length, num_users))
        context.say(f"{num_users} users at {tokens} tokens: {1000 * median(gaps_s):.1f} ms a step")
    return observations


async def _closed(
    client: Client,
    context: BenchContext,
    random: Random,
    num_users: int,
    prompt_tokens: int,
    output_tokens: int,
) -> tuple[float, float]:
    """(median TTFT, median gap) of users who ask once, all at the same time."""
    requests = [
        completion(context.served_name, random_ids(random, prompt_tokens), output_tokens)
        for _ in range(num_users)
    ]
    load = await run_closed_loop(client, iter(requests), num_users)
    for outcome in load.outcomes:
        if not outcome.is_ok:
            raise BenchError(f"a request of {prompt_tokens} tokens failed: {outcome.error}")
    gaps_s = [gap for outcome in load.outcomes for gap in outcome.gaps_s]
    return median(outcome.ttft_s for outcome in load.outcomes), median(gaps_s)


def _capacity(law: StepLaw, sizes: Sizes) -> float:
    """Requests per second that would keep the engine computing, with `typical_users` at once."""
    prompt = sum(sizes.load_prompt_tokens) / 2
    users = sizes.typical_users
    step_s = law.seconds(
        Observation(1.0, 1, 0, users * (prompt + sizes.load_output_tokens / 2), users)
    )
    prefill_s = law.seconds(Observation(1.0, 1, prompt, prompt, 1))
    return 1.0 / (prefill_s + sizes.load_output_tokens * step_s / users)


def _independent(sizes: Sizes, rate: float, seed: int) -> list[_Asked]:
    random = Random(f"calibrate-{seed}")
    asked: list[_Asked] = []
    for number, offset_s in enumerate(poisson_offsets(rate, sizes.load_s, seed)):
        tokens = random.randint(*sizes.load_prompt_tokens)
        prompt = PromptSpec(None, f"p{number}", tokens)
        asked.append(_Asked(offset_s, random_ids(random, tokens), prompt, sizes.load_output_tokens))
    return asked


def _shared_prefix(sizes: Sizes, seconds: float, seed: int) -> list[_Asked]:
    shape = sizes.shape
    prompts = shared_prefix_prompts(shape, seed)
    random = Random(f"calibrate-{seed}")
    asked: list[_Asked] = []
    for offset_s in poisson_offsets(sizes.sim_rate, seconds, seed):
        at = random.randrange(len(prompts))
        group = PromptSpec(None, f"g{at // shape.questions_per_group}", shape.prefix_tokens)
        prompt = group.then(f"q{at % shape.questions_per_group}", shape.question_tokens)
        asked.append(_Asked(offset_s, prompts[at], prompt, shape.output_tokens))
    return asked


def _workload(asked: Sequence[_Asked]) -> Workload:
    return OpenLoop(
        SimRequest(a.offset_s, a.prompt, a.output_tokens, session=f"s{number}")
        for number, a in enumerate(asked)
    )


async def _offer(
    client: Client, asked: Sequence[_Asked], seconds: float, model: str, warmup_s: float = 0.0
) -> LoadFigures:
    requests: list[Request] = [completion(model, a.prompt_ids, a.output_tokens) for a in asked]
    offsets = [a.offset_s for a in asked]
    load = await run_open_loop(client, iter(requests), offsets, seconds, drain_s=seconds)
    await asyncio.sleep(1.0)
    return summarise(load.outcomes, load.start_s + warmup_s, load.end_s)


def _core(num_blocks: int) -> CoreConfig:
    return CoreConfig(num_blocks=num_blocks, max_model_len=8192)


def _flags(core: CoreConfig) -> tuple[str, ...]:
    """Both worlds have the same limits."""
    return (
        *("--num-gpu-blocks-override", str(core.num_blocks)),
        *("--max-model-len", str(core.max_model_len)),
        *("--max-num-seqs", str(core.max_num_seqs)),
        *("--max-num-batched-tokens", str(core.max_num_batched_tokens)),
    )
