"""`kvoy bench soak prompts`: prompts that nobody has sent before, until all that a router remembers
is full, and on from there.

Simulated engines report what they hold and evict; the router and the client are processes of their
own. The index gets less room than the engines' caches together, so that it reaches its bound too;
all else is as by default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.processes import cpu_seconds
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.soak.config import SoakConfig
from kvoy_cli.bench.soak.growth import growth_goal, growth_table
from kvoy_cli.bench.soak.memory import Growth
from kvoy_cli.bench.soak.prompt_client import SERVED_NAME, Progress
from kvoy_cli.bench.soak.streams import ROUTER_FLAGS
from kvoy_cli.bench.soak.watch import Course, Watched, follow, load
from kvoy_cli.bench.stack import EngineSpec, engines, router, sim_engine
from kvoy_cli.bench.stats import ratio
from kvoy_contract import known_prefixes, segment_cache
from kvoy_router.prefix_index import ENTRY_BYTES

NUM_ENGINES = 2
BLOCKS_PER_ENGINE = 200_000
"""3.2 million tokens: together more hashes than the index has room for."""
INDEX_MIB = 8
_FULL = 0.9
"""A full shard of the index drops a sixteenth of its entries."""
_TOKENS_PER_WORD = 1.3
_SAY_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Cache:
    name: str
    gauge: str
    bound: float
    """In bytes."""
    unit_bytes: int = 1
    """What the gauge counts."""

    def num_bytes(self, look: Watched) -> float:
        return self.unit_bytes * look.gauges[self.gauge]


CACHES = (
    Cache("index", "kvoy_router_index_entries", float(INDEX_MIB << 20), ENTRY_BYTES),
    Cache(
        "pieces of prompts",
        "kvoy_router_prompt_segment_bytes",
        float(segment_cache.DEFAULT_MAX_BYTES),
    ),
    Cache(
        "beginnings of chats",
        "kvoy_router_known_prefix_bytes",
        float(known_prefixes.DEFAULT_MAX_BYTES),
    ),
)


def engine_spec(config: SoakConfig, folder: str | None) -> EngineSpec:
    """Fast enough for any rate that a router can take."""
    flags = ["--num-gpu-blocks-override", str(BLOCKS_PER_ENGINE)]
    flags += ["--sim-base-s", "0.03", "--sim-prefill-tokens-per-s", "200000"]
    flags += [] if folder is None else ["--tokenizer", folder]
    return sim_engine(*flags, served_name=SERVED_NAME)


async def run(config: SoakConfig, context: BenchContext) -> Report:
    folder = None if config.model == "bytes" else str(context.model_folder())
    per_word = _TOKENS_PER_WORD if folder else 6.0
    words = max(1, round(config.prompt_tokens / per_word))
    flags = (*ROUTER_FLAGS, "--index-mib", str(INDEX_MIB))
    context.say(f"{NUM_ENGINES} simulated engines and a router")
    async with (
        engines([engine_spec(config, folder)] * NUM_ENGINES, context) as started,
        router([e.router_entry for e in started], "kv-aware", context, *flags) as front,
        load(
            "prompt_client",
            [str(front.port), "--rate", str(config.per_s), "--words", str(words)],
            Progress,
            Progress(),
            context,
        ) as client,
    ):

        def say(look: Watched, progress: Progress) -> None:
            if look.sample.at_s % _SAY_EVERY_S < 2.0:
                shares = ", ".join(
                    f"{cache.name} {100 * cache.num_bytes(look) / cache.bound:.0f} %"
                    for cache in CACHES
                )
                context.say(
                    f"{look.sample.at_s:.0f} s: {progress.answered:,} answered, {shares}, "
                    f"{look.sample.resident_bytes / 1e6:.0f} MB"
                )

        url = f"{front.url}/metrics"
        pids = [engine.child.pid for engine in started]
        before_s = sum(map(cpu_seconds, pids))
        course = await follow(front.child, url, client, config.duration_s, say)
        engines_s = sum(map(cpu_seconds, pids)) - before_s
    return build_report(config, course, client.progress, engines_s)


def full_at_s(course: Course[Progress], cache: Cache) -> float:
    """When the cache had reached nine tenths of its bound; inf: never."""
    return next(
        (look.sample.at_s for look in course.looks if cache.num_bytes(look) >= _FULL * cache.bound),
        math.inf,
    )


def build_report(
    config: SoakConfig, course: Course[Progress], final: Progress, engines_s: float
) -> Report:
    full_s = {cache.name: full_at_s(course, cache) for cache in CACHES}
    filled_s = [at_s for at_s in full_s.values() if not math.isinf(at_s)]
    warm_s = max([config.warmup_s, *filled_s])
    looks = [look for look in course.looks if look.sample.at_s >= warm_s]
    growth = Growth.of([look.sample for look in looks] or [look.sample for look in course.looks])
    last = course.looks[-1]
    in_all_s = last.sample.at_s
    return Report(
        name="soak prompts",
        setting=(
            f"{config.per_s:g} new chats per second (Poisson) of about {config.prompt_tokens:,} "
            f"tokens, each from another tenant, on {NUM_ENGINES} simulated engines of "
            f"{BLOCKS_PER_ENGINE:,} blocks; {in_all_s:.0f} s; memory counts from {warm_s:.0f} s on"
        ),
        tables=(
            Table(
                "Prompts",
                ("sent", "answered", "failed", "router: cores", "CPU ms per prompt", "engines"),
                (
                    (
                        final.sent,
                        final.answered,
                        final.failed,
                        last.sample.cpu_s / in_all_s,
                        1000 * ratio(last.sample.cpu_s, final.answered),
                        engines_s / in_all_s,
                    ),
                ),
            ),
            Table(
                "What the router remembers",
                ("cache", "bound MB", "at the end MB", "full after s"),
                tuple(
                    (
                        cache.name,
                        cache.bound / 1e6,
                        cache.num_bytes(last) / 1e6,
                        full_s[cache.name],
                    )
                    for cache in CACHES
                ),
            ),
            growth_table(growth),
        ),
        goals=(
            Goal("prompts that failed", float(final.failed), "==", 0.0),
            Goal("caches that are full", float(len(filled_s)), "==", float(len(CACHES))),
            growth_goal(growth),
        ),
        notes=(
            f"full: {100 * _FULL:.0f} % of its bound; also bounded, without a size in bytes: "
            "decisions, tenants, leases",
            *((f"first failure: {final.failure}",) if final.failure else ()),
        ),
        figures={
            "answered": float(final.answered),
            "failed": float(final.failed),
            "rss_spread": growth.spread,
            "rss_bytes_per_hour": growth.bytes_per_hour,
            **{f"full_s_{name.replace(' ', '_')}": at_s for name, at_s in full_s.items()},
        },
    )
