"""The settings of each `kvoy simulate` command: one frozen value, checked once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvoy_contract.settings import setting

_SCENARIO = "a scenario file, or the name of one that is shipped: see `kvoy simulate list`"
_SEEDS = "runs with neighbouring seeds; intervals need at least two"
_RATE = "instead of the scenario's own rate (of a closed loop: users)"
_PROCESSES = "processes that simulate at once (default: one per core)"
_TRACE = "replay this trace in the Mooncake format instead of the scenario's workload"


@dataclass(frozen=True, slots=True)
class RunConfig:
    scenario: str = setting(positional=True, help=_SCENARIO)
    policy: str = setting("kv-aware", help="a router's policy, or a baseline of docs/simulate.md")
    rate: float | None = setting(None, help=_RATE)
    seed: int = setting(0, help="the first seed; fixes requests, ties and losses")
    seeds: int = setting(1, help=_SEEDS)
    trace: str | None = setting(None, metavar="FILE", help=_TRACE)
    plots: str | None = setting(
        None, metavar="FOLDER", help="write plots of the first seed's run, as PNG and SVG"
    )
    json: bool = setting(False, help="print JSON instead of a table")
    processes: int | None = setting(None, help=_PROCESSES)

    def __post_init__(self) -> None:
        _check(self.seeds, self.rate, self.processes)


@dataclass(frozen=True, slots=True)
class CompareConfig:
    scenario: str = setting(positional=True, help=_SCENARIO)
    policies: str = setting(
        "kv-aware,least-load,round-robin",
        help="names with commas between; each is compared with the first",
    )
    rate: float | None = setting(None, help=_RATE)
    seed: int = setting(0, help="the first seed; all policies meet the same requests")
    seeds: int = setting(3, help=_SEEDS)
    trace: str | None = setting(None, metavar="FILE", help=_TRACE)
    json: bool = setting(False, help="print JSON instead of a table")
    processes: int | None = setting(None, help=_PROCESSES)

    def __post_init__(self) -> None:
        _check(self.seeds, self.rate, self.processes)
        names = self.policy_names
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(f"--policies must be two or more different names, not {self.policies}")

    @property
    def policy_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.policies.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class LadderConfig:
    scenario: str = setting(positional=True, help=_SCENARIO)
    policy: str = setting("kv-aware", help="a router's policy, or a baseline of docs/simulate.md")
    first_rate: float = setting(8.0, help="requests per second at which the search begins")
    tolerance: float = setting(0.5, help="requests per second between the last two rates")
    seed: int = setting(0, help="fixes requests, ties and losses")
    json: bool = setting(False, help="print JSON instead of a table")

    def __post_init__(self) -> None:
        for name in ("first_rate", "tolerance"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0")


@dataclass(frozen=True, slots=True)
class GoalsConfig:
    check: bool = setting(False, help="exit 1 where a goal is missed")
    only: str | None = setting(
        None, metavar="ROW", help="only the rows whose name contains this; see the table"
    )
    seeds: int = setting(3, help=_SEEDS)
    smoke: bool = setting(
        False, help="a tenth of the time of each scenario, to see that it runs; figures mean little"
    )
    json: bool = setting(False, help="print JSON instead of a table")
    processes: int | None = setting(None, help=_PROCESSES)

    def __post_init__(self) -> None:
        _check(self.seeds, None, self.processes)


_MIN_KV_TOKENS = 32_768
"""The longest sequence that these engines take."""


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    engines: int = setting(1000, help="simulated engines")
    rate: float = setting(10_000.0, help="requests per virtual second, 1,000 tokens in, 100 out")
    warmup: float = setting(
        8.0, help="virtual seconds before the measured ones; after 28 all caches are full"
    )
    duration: float = setting(1.0, help="measured virtual seconds")
    kv_tokens: int = setting(307_328, help="KV tokens of each engine; a quarter is full after 7 s")
    json: bool = setting(False, help="print JSON instead of a sentence")

    def __post_init__(self) -> None:
        if self.engines < 1:
            raise ValueError(f"--engines must be at least 1, not {self.engines}")
        for name in ("rate", "duration"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} must be above 0, not {getattr(self, name)}")
        if self.warmup < 0:
            raise ValueError(f"--warmup must be at least 0, not {self.warmup}")
        if self.kv_tokens < _MIN_KV_TOKENS:
            raise ValueError(f"--kv-tokens must be at least {_MIN_KV_TOKENS}, not {self.kv_tokens}")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    output: str = setting(positional=True, help="the file to write; `.gz` at the end packs it")
    rate: float = setting(4.0, help="requests per second")
    duration: float = setting(300.0, help="seconds")
    seed: int = setting(0, help="fixes the trace")


def num_processes(configured: int | None, num_jobs: int) -> int:
    return max(1, min(configured or os.cpu_count() or 1, num_jobs))


def _check(seeds: int, rate: float | None, processes: int | None) -> None:
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, not {seeds}")
    if rate is not None and not rate > 0:
        raise ValueError(f"--rate must be above 0, not {rate:g}")
    if processes is not None and processes < 1:
        raise ValueError(f"--processes must be at least 1, not {processes}")
