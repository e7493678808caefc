"""What a virtual second of a large fleet costs: seconds of one core, and memory.

    kvoy simulate scale --engines 1000 --rate 10000

All prompts differ, and engines are those of the shared-prefix scenario. Counted is what comes after
a warm-up. As many requests end as begin once the first answers are complete, after about six
virtual seconds; caches are full, and memory grows no more, after about 28, or after seven with a
quarter of the memory (`--kv-tokens 76832`).
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from kvoy_engine.core_config import CoreConfig
from kvoy_simulate.fleet import Fleet, kept_from_collection
from kvoy_simulate.outcome import Status
from kvoy_simulate.scenario import EngineGroup, Scenario
from kvoy_simulate.traffic import PromptSpec, SimRequest

KV_TOKENS = 307_328


class Strangers:
    """Requests of equal size, none of which has anything in common with another."""

    def __init__(self, rate: float, prompt_tokens: int, output_tokens: int, seed: int) -> None:
        self._random = Random(f"strangers/{seed}")
        self._rate = rate
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens

    def start(self) -> Iterator[SimRequest]:
        at_s, number = 0.0, 0
        while True:
            at_s += self._random.expovariate(self._rate)
            number += 1
            name = f"stranger-{number}"
            prompt = PromptSpec(None, name, self._prompt_tokens)
            yield SimRequest(at_s, prompt, self._output_tokens, name)

    def on_finish(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return None


@dataclass(frozen=True, slots=True)
class Scale:
    num_engines: int
    rate: float
    """Requests per virtual second."""
    cpu_s: float
    """Seconds of one core for a virtual second."""
    wall_s: float
    """Seconds of real time for a virtual second: more, where the machine has other work."""
    load_average: float
    """Of the machine over the last minute: processes that computed or wanted to."""
    peak_bytes: int
    requests_per_s: float
    """That ended, in virtual time."""
    tokens_per_s: float
    """Generated, in virtual time."""
    steps_per_s: float
    events_per_s: float
    """Of telemetry."""
    full_share: float
    """Of the fleet's blocks, those that hold something at the end."""


def scenario(num_engines: int, rate: float, duration_s: float, kv_tokens: int) -> Scenario:
    core = CoreConfig(
        num_blocks=kv_tokens // 16, max_model_len=32_768, interference_ratio=0, max_step_s=0
    )
    return Scenario(
        engines=(EngineGroup(name="engine", count=num_engines, core=core),),
        workload=lambda seed: Strangers(rate, 1000, 100, seed),
        duration_s=duration_s,
        flow=None,  # the cost of picks, reports and engines is what is measured
    )


def measure(
    num_engines: int = 1000,
    rate: float = 10_000.0,
    *,
    warmup_s: float = 8.0,
    for_s: float = 1.0,
    kv_tokens: int = KV_TOKENS,
) -> Scale:
    """Simulates `warmup_s + for_s` virtual seconds; the fleet is given up in the midst of it."""
    fleet = Fleet(scenario(num_engines, rate, warmup_s + for_s, kv_tokens), "kv-aware", seed=1)
    fleet.begin()
    with kept_from_collection():
        fleet.clock.run(warmup_s)
        before, ended = fleet.outcome().counters, _num_ended(fleet)
        cpu_before_s, before_s = time.process_time(), time.perf_counter()
        fleet.clock.run(warmup_s + for_s)
        cpu_s = time.process_time() - cpu_before_s
        wall_s = time.perf_counter() - before_s
    after = fleet.outcome().counters

    def per_s(name: str) -> float:
        return (after[name] - before[name]) / for_s

    return Scale(
        num_engines=num_engines,
        rate=rate,
        cpu_s=cpu_s / for_s,
        wall_s=wall_s / for_s,
        load_average=os.getloadavg()[0],
        peak_bytes=_peak_bytes(),
        requests_per_s=(_num_ended(fleet) - ended) / for_s,
        tokens_per_s=per_s("generated_tokens"),
        steps_per_s=per_s("steps"),
        events_per_s=per_s("telemetry_events"),
        full_share=_full_share(fleet),
    )


def _num_ended(fleet: Fleet) -> int:
    return sum(status != Status.UNFINISHED for status in fleet.recorder.requests.status)


def _full_share(fleet: Fleet) -> float:
    loads = [engine.core.load() for engine in fleet.engines.values()]
    return 1.0 - sum(load.free_blocks for load in loads) / sum(load.total_blocks for load in loads)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def report(scale: Scale) -> str:
    return (
        f"{scale.num_engines} engines, {scale.rate:,.0f} requests/s of 1,000 tokens in and 100 out:"
        f" {scale.cpu_s:.1f} s of one core per virtual second ({scale.wall_s:.1f} s of real time"
        f" at a load of {scale.load_average:.1f}), {scale.peak_bytes / 1e9:.2f} GB at most."
        f" Per virtual second {scale.requests_per_s:,.0f} requests ended,"
        f" {scale.tokens_per_s:,.0f} tokens, {scale.steps_per_s:,.0f} steps,"
        f" {scale.events_per_s:,.0f} telemetry events; caches are {100 * scale.full_share:.0f} %"
        " full."
    )
