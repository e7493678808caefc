"""Where each route sends what: the same mixes through all of them, onto the same simulated
engines, and what the engines' own counters say afterwards.

No route profits from another: each has texts of its own, made alike. All start on engines full of
the texts of those before."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice

import httpx

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.load import LoadRun, run_closed_loop, run_open_loop
from kvoy_cli.bench.outcome import Outcome, summarise
from kvoy_cli.bench.request import Request, chat
from kvoy_cli.bench.schedule import poisson_offsets
from kvoy_cli.bench.stack import Engine, engines, settle, sim_engine
from kvoy_cli.bench.workloads import SharedPrefixShape
from kvoy_peers.figures import (
    Bounds,
    EngineCounters,
    Placement,
    hit_rate_of,
    parse_counters,
    spread_of,
)
from kvoy_peers.routes import Route
from kvoy_peers.traffic import ChatUsers, Groups, Messages, drawn, letters, unique

_HTTP_S = 10.0
_IDLE_LIMIT_S = 30.0
_IDLE_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class PlacementSizes:
    """A tenth of the published shared-prefix workload's tokens, so that two cores carry it."""

    num_engines: int = 4
    groups: Groups = field(default_factory=lambda: Groups(40))
    warmed_groups: Groups = field(default_factory=lambda: Groups(24))
    users: ChatUsers = field(default_factory=lambda: ChatUsers(24))
    output_tokens: int = 24
    rate: float = 12.0
    unique_chars: int = 256
    unique_rate: float = 16.0
    hot_prefix_chars: int = 1200
    hot_rate: float = 24.0
    seconds: float = 8.0
    drain_s: float = 5.0
    step_s: float = 0.014
    prefill_tokens_per_s: float = 2000.0

    @property
    def blocks_per_engine(self) -> int:
        """With which the groups fill the same share of the fleet's memory as published."""
        shape = SharedPrefixShape(
            self.groups.num_groups,
            self.groups.questions_per_group,
            self.groups.prefix_chars,
            self.groups.question_chars,
            self.output_tokens,
        )
        return shape.blocks_per_engine(self.num_engines)

    def engine_flags(self) -> tuple[str, ...]:
        return (
            *("--num-gpu-blocks-override", str(self.blocks_per_engine)),
            *("--sim-base-s", str(self.step_s)),
            *("--sim-prefill-tokens-per-s", str(self.prefill_tokens_per_s)),
        )


@asynccontextmanager
async def placement_engines(
    context: BenchContext, sizes: PlacementSizes
) -> AsyncIterator[list[Engine]]:
    spec = sim_engine(*sizes.engine_flags())
    async with engines([spec] * sizes.num_engines, context) as started:
        yield started


Mix = Callable[[Client, str], Awaitable[LoadRun]]
"""Sends one mix; the text is the seed of its texts, of the route's own. Who asks when, and what in
which order, is the same for all routes."""
_ORDER = "the same for all"


class PlacementRun:
    def __init__(
        self, context: BenchContext, sizes: PlacementSizes, engines: Sequence[Engine]
    ) -> None:
        self._context = context
        self._sizes = sizes
        self._engines = engines
        self._mixes: dict[str, Mix] = {
            "shared prefix": self._shared_prefix,
            "shared prefix after a sequential warm-up": self._warmed,
            "conversations": self._conversations,
            "no reuse": self._no_reuse,
            "hot spot": self._hot_spot,
        }

    async def measure(self, routes: Sequence[Route]) -> dict[str, dict[str, Placement]]:
        placements: dict[str, dict[str, Placement]] = {}
        for name, mix in self._mixes.items():
            by_route = placements.setdefault(name, {})
            for route in routes:
                self._context.say(f"{name}: {route.name}")
                by_route[route.name] = await self._measure_one(name, mix, route)
        return placements

    async def _measure_one(self, name: str, mix: Mix, route: Route) -> Placement:
        before = await self._counters()
        load = await mix(route.client, f"{name}-{route.name}")
        await self._wait_idle()
        after = await self._counters()
        used = [now.since(then) for now, then in zip(after, before, strict=True)]
        return _placement(load, used)

    # The mixes

    async def _shared_prefix(self, client: Client, seed: str) -> LoadRun:
        prompts = drawn(self._sizes.groups.prompts(seed), _ORDER)
        return await self._offer(client, prompts, self._sizes.rate)

    async def _warmed(self, client: Client, seed: str) -> LoadRun:
        """One request after the other tells every group once; then as above."""
        groups = self._sizes.warmed_groups
        prompts = groups.prompts(seed)
        firsts = prompts[:: groups.questions_per_group]
        await run_closed_loop(client, (self._request(prompt, 1) for prompt in firsts), 1)
        return await self._offer(client, drawn(prompts, _ORDER), self._sizes.rate)

    async def _no_reuse(self, client: Client, seed: str) -> LoadRun:
        prompts = unique(self._sizes.unique_chars, seed)
        return await self._offer(client, prompts, self._sizes.unique_rate)

    async def _hot_spot(self, client: Client, seed: str) -> LoadRun:
        prefix = letters(random.Random(seed), self._sizes.hot_prefix_chars)
        prompts = unique(self._sizes.groups.question_chars // 2, seed, prefix)
        return await self._offer(client, prompts, self._sizes.hot_rate)

    async def _conversations(self, client: Client, seed: str) -> LoadRun:
        cpu_before = time.process_time()
        start_s = time.perf_counter()
        outcomes: list[Outcome] = []
        async with asyncio.TaskGroup() as group:
            for index in range(self._sizes.users.num_users):
                group.create_task(self._chat(client, index, seed, outcomes))
        end_s = time.perf_counter()
        cpu_s = time.process_time() - cpu_before
        return LoadRun(outcomes, start_s, end_s, cpu_s / (end_s - start_s))

    async def _chat(self, client: Client, number: int, seed: str, outcomes: list[Outcome]) -> None:
        """One user: thinks, asks, reads, and so on; ends at a failure."""
        messages: Messages = []
        for turn in self._sizes.users.turns(number, seed):
            await asyncio.sleep(turn.think_s)
            messages.append({"role": "user", "content": turn.text})
            outcome = Outcome(due_s=time.perf_counter())
            outcomes.append(outcome)
            await client.send(self._request(messages, self._sizes.output_tokens), outcome)
            if not outcome.is_ok:
                return
            messages.append({"role": "assistant", "content": outcome.text})

    async def _offer(self, client: Client, prompts: Iterator[Messages], rate: float) -> LoadRun:
        sizes = self._sizes
        offsets = poisson_offsets(rate, sizes.seconds, seed=1)
        requests = [
            self._request(prompt, sizes.output_tokens) for prompt in islice(prompts, len(offsets))
        ]
        return await run_open_loop(client, iter(requests), offsets, sizes.seconds, sizes.drain_s)

    def _request(self, messages: Messages, num_tokens: int) -> Request:
        return chat(self._context.served_name, messages, num_tokens)

    # The engines' own words

    async def _counters(self) -> list[EngineCounters]:
        async with httpx.AsyncClient(timeout=_HTTP_S, trust_env=False) as client:
            answers = [await client.get(f"{engine.url}/metrics") for engine in self._engines]
        return [parse_counters(answer.raise_for_status().text) for answer in answers]

    async def _wait_idle(self) -> None:
        """Until nobody's counter moves: what was cut is then out of the engines."""
        deadline_s = time.perf_counter() + _IDLE_LIMIT_S
        last: list[EngineCounters] = []
        while time.perf_counter() < deadline_s:
            await settle(_IDLE_POLL_S)
            now = await self._counters()
            if now == last:
                return
            last = now


def _placement(load: LoadRun, used: Sequence[EngineCounters]) -> Placement:
    figures = summarise(load.outcomes, load.start_s, load.end_s)
    bounds = Bounds()
    num_good = sum(map(bounds.are_kept_by, load.outcomes))
    return Placement(
        ttft_p50_s=figures.ttft_p50_s,
        ttft_p90_s=figures.ttft_p90_s,
        tokens_per_s=figures.output_tokens_per_s,
        goodput=num_good / (load.end_s - load.start_s),
        spread=spread_of([engine.requests for engine in used]),
        hit_rate=hit_rate_of(used),
        num_requests=figures.num_requests,
        num_failed=figures.num_errors,
    )
