"""Sizes of the calibration, and the report of real against virtual time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.outcome import LoadFigures
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.stats import Spread, median, percentile, ratio
from kvoy_cli.bench.step_fit import StepLaw
from kvoy_cli.bench.workloads import SharedPrefixShape
from kvoy_simulate.measures import Measures

_TTFT_ERROR = 0.2
_THROUGHPUT_ERROR = 0.1
_SHAPE = SharedPrefixShape()


@dataclass(frozen=True, slots=True)
class Sizes:
    prefill_tokens: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Each is one step: below what the engine computes within its bound on a step's time."""
    decode_loads: tuple[tuple[int, int], ...] = ((1, 32), (1, 768), (4, 128), (8, 32), (8, 512))
    """(users at once, prompt tokens)."""
    decode_output_tokens: int = 24
    num_blocks: int = 1500
    load_s: float = 40.0
    load_share: float = 0.5
    """Of the rate that would keep the engine computing."""
    typical_users: float = 4.0
    load_prompt_tokens: tuple[int, int] = (48, 320)
    load_output_tokens: int = 24
    num_sim_engines: int = 4
    sim_rate: float = 4.0
    sim_warmup_s: float = 15.0
    sim_load_s: float = 30.0
    sim_base_s: float = 0.025
    sim_prefill_tokens_per_s: float = 800.0
    sim_context_s: float = 1e-6
    shape: SharedPrefixShape = _SHAPE


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests in both worlds."""

    real: LoadFigures
    virtual: Measures


@dataclass(frozen=True, slots=True)
class Fitted:
    """One load on the real engine, with the law of its steps."""

    law: StepLaw
    pair: Pair
    errors: Sequence[float]
    """Of the law, relative, for a few steps at a time."""


@dataclass(frozen=True, slots=True)
class _Figure:
    name: str
    real: Callable[[LoadFigures], float]
    virtual: Callable[[Measures], float]


_THROUGHPUT = _Figure(
    "output tokens/s", lambda f: f.output_tokens_per_s, lambda m: m.output_tokens_per_s
)
_TTFT_P50 = _Figure("TTFT p50, s", lambda f: f.ttft_p50_s, lambda m: m.ttft_p50_s)
_TTFT_P90 = _Figure("TTFT p90, s", lambda f: f.ttft_p90_s, lambda m: m.ttft_p90_s)
_FIGURES = (_THROUGHPUT, _TTFT_P50, _TTFT_P90)


def build_report(sizes: Sizes, fitted: Sequence[Fitted], simulated: Sequence[Pair]) -> Report:
    real = [one.pair for one in fitted]
    goals = (
        _goal("real engine, TTFT p50", real, _TTFT_P50, _TTFT_ERROR),
        _goal("real engine, TTFT p90", real, _TTFT_P90, _TTFT_ERROR),
        _goal("simulated engines, throughput", simulated, _THROUGHPUT, _THROUGHPUT_ERROR),
        _goal("simulated engines, TTFT p50", simulated, _TTFT_P50, _TTFT_ERROR),
    )
    late_s = max(pair.real.lateness_p99_s for pair in [*real, *simulated])
    return Report(
        name="calibrate",
        setting=f"one real engine, then {sizes.num_sim_engines} simulated ones behind a kv-aware "
        f"router; the same requests over HTTP and in virtual time, {len(real)} repeats",
        tables=(
            _law_table(fitted),
            _table("Real engine", real),
            _table("Simulated engines behind a router", simulated),
        ),
        goals=goals,
        notes=(f"load generator: p99 of its lateness {1000 * late_s:.1f} ms at most",),
        figures={goal.name: goal.figure for goal in goals},
    )


def _law_table(fitted: Sequence[Fitted]) -> Table:
    def row(name: str, value: Callable[[Fitted], float], digits: int) -> tuple[str, str]:
        return name, Spread.of([value(one) for one in fitted]).text(digits)

    return Table(
        "Step law of the real engine, fitted to the steps of each load",
        ("part", "median (least–greatest)"),
        (
            row("every step, ms", lambda f: 1000 * f.law.timing.base_s, 2),
            row("prefill, tokens/s", lambda f: f.law.timing.prefill_tokens_per_s, 0),
            row("context, ns per token", lambda f: 1e9 * f.law.timing.context_token_s, 0),
            row("sequence, ms", lambda f: 1000 * f.law.timing.row_s, 3),
            row("request outside of steps, ms", lambda f: 1000 * f.law.overhead_s, 2),
            row("eight steps are off by, %, p50", lambda f: _error_percent(f, 50), 1),
            row("eight steps are off by, %, p90", lambda f: _error_percent(f, 90), 1),
        ),
    )


def _error_percent(fitted: Fitted, q: float) -> float:
    return 100 * percentile([abs(error) for error in fitted.errors], q)


def _table(title: str, pairs: Sequence[Pair]) -> Table:
    rows = tuple(
        (
            figure.name,
            Spread.of([figure.real(pair.real) for pair in pairs]).text(3),
            Spread.of([figure.virtual(pair.virtual) for pair in pairs]).text(3),
            Spread.of(_ratios(pairs, figure)).text(3),
        )
        for figure in _FIGURES
    )
    columns = ("", "real time", "virtual time", "virtual ÷ real")
    return Table(f"{title}: median (least–greatest)", columns, rows)


def _ratios(pairs: Sequence[Pair], figure: _Figure) -> list[float]:
    return [ratio(figure.virtual(pair.virtual), figure.real(pair.real)) for pair in pairs]


def _goal(name: str, pairs: Sequence[Pair], figure: _Figure, bound: float) -> Goal:
    """The median ratio's distance from 1."""
    return Goal(f"{name}: error", abs(median(_ratios(pairs, figure)) - 1.0), "<=", bound)
