"""Sizes and figures of the shared-prefix benchmark, and the report made of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.knee import Ladder
from kvoy_cli.bench.outcome import LoadFigures
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.stats import Spread, median, paired_ratios
from kvoy_cli.bench.workloads import SharedPrefixShape

_THROUGHPUT_GOAL = 1.8
_TTFT_GOAL = 1 / 20
_BLOCK_SIZE = 16


_SHAPE = SharedPrefixShape()


@dataclass(frozen=True, slots=True)
class Sizes:
    """The defaults keep the router, the generator and eight engines at about half of two cores."""

    shape: SharedPrefixShape = _SHAPE
    num_engines: int = 8
    share_of_all_kv: float = 0.73
    prefill_tokens_per_s: float = 800.0
    """With 720 tokens a prompt takes 0.9 s alone: about what 7,200 take on a large accelerator."""
    step_s: float = 0.025
    context_token_s: float = 1e-6
    bound_s: float = 2.0
    """The knee is the highest rate with a TTFT p90 within it: twice an idle engine's TTFT."""
    ramp_s: float = 10.0
    """Discarded at the start of a window: longer than an answer takes."""
    window_s: float = 15.0
    backlog_s: float = 30.0
    """How long the load of knee + 50 % lasts; the longer, the worse for who cannot carry it."""
    drain_s: float = 60.0
    """How long first tokens are awaited after the last arrival."""
    start_rate: float = 4.0
    warm_users: int = 32
    num_refinements: int = 2
    max_rungs: int = 10
    no_reuse_share: float = 0.8
    """Rate of the traffic without reuse, of round-robin's knee."""
    no_reuse_s: float = 12.0
    """Window of that traffic; half as long a ramp before it is discarded."""

    @property
    def blocks_per_engine(self) -> int:
        return self.shape.blocks_per_engine(self.num_engines, _BLOCK_SIZE, self.share_of_all_kv)

    @property
    def working_set_in_engines(self) -> float:
        """Prefixes and questions over one engine's KV."""
        return self.shape.working_set_tokens / (self.blocks_per_engine * _BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Offered:
    """A load: a multiple of the knee, for how long, and what is discarded before or awaited
    after."""

    factor: float
    ramp_s: float
    window_s: float
    drain_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    offered: Offered
    rate: float
    figures: dict[str, list[LoadFigures]]

    def values(self, policy: str, pick: Callable[[LoadFigures], float]) -> list[float]:
        return [pick(figures) for figures in self.figures[policy]]

    def ratios(self, pick: Callable[[LoadFigures], float]) -> list[float]:
        """kv-aware over round-robin, repeat by repeat."""
        return paired_ratios(self.values("kv-aware", pick), self.values("round-robin", pick))


@dataclass(frozen=True, slots=True)
class NoReuse:
    rate: float
    figures: dict[str, list[LoadFigures]]


def build_report(
    sizes: Sizes,
    ladder: Ladder,
    comparisons: Sequence[Comparison],
    no_reuse: NoReuse,
    cpu_shares: Sequence[tuple[float, float, float]],
) -> Report:
    at_half_more, at_three = comparisons
    throughput = at_three.ratios(lambda f: f.output_tokens_per_s)
    ttft = at_half_more.ratios(lambda f: f.ttft_p90_s)
    tables = (
        Table(
            f"Round-robin's ladder: knee at {ladder.knee:.2f} requests/s",
            ("requests/s", "TTFT p90 s", f"within {sizes.bound_s:g} s"),
            tuple((r.rate, r.figure, "yes" if r.is_within else "no") for r in ladder.rungs),
        ),
        _comparison_table(at_half_more),
        _comparison_table(at_three),
        _no_reuse_table(no_reuse, sizes),
    )
    return Report(
        name="shared-prefix",
        setting=_setting(sizes, at_half_more, len(throughput)),
        tables=tables,
        goals=(
            Goal(
                "output tokens/s at 3 × round-robin's knee, kv-aware ÷ round-robin",
                median(throughput),
                ">=",
                _THROUGHPUT_GOAL,
                " ×",
            ),
            Goal(
                "TTFT p90 at round-robin's knee + 50 %, kv-aware ÷ round-robin",
                median(ttft),
                "<=",
                _TTFT_GOAL,
            ),
        ),
        notes=(
            _cpu_note(cpu_shares),
            f"throughput ratio {Spread.of(throughput).text()}, "
            f"TTFT ratio {Spread.of(ttft).text(4)}",
            "at 3 × the knee the load is cut while a backlog stands: a TTFT of never means that "
            "the p90 was still in it",
        ),
        figures={
            "round_robin_knee_requests_per_s": ladder.knee,
            "throughput_ratio_at_3_knees": median(throughput),
            "ttft_p90_ratio_at_1_5_knees": median(ttft),
        },
    )


def _setting(sizes: Sizes, backlog: Comparison, repeats: int) -> str:
    shape = sizes.shape
    return (
        f"{sizes.num_engines} simulated engines of {sizes.blocks_per_engine * _BLOCK_SIZE:,} KV "
        f"tokens; {shape.num_groups} groups × {shape.questions_per_group} questions, "
        f"{shape.prefix_tokens} + {shape.question_tokens} + {shape.output_tokens} tokens: "
        f"{sizes.share_of_all_kv:.2f} of all KV, {sizes.working_set_in_engines:.1f} × one "
        f"engine's; prefill {sizes.prefill_tokens_per_s:g} tokens/s, step "
        f"{1000 * sizes.step_s:g} ms; {repeats} repeats; load of "
        f"knee + 50 % lasts {backlog.offered.window_s:.0f} s"
    )


def _comparison_table(comparison: Comparison) -> Table:
    rows = []
    for policy, runs in comparison.figures.items():
        rows.append(
            (
                policy,
                median(f.output_tokens_per_s for f in runs),
                median(f.ttft_p50_s for f in runs),
                median(f.ttft_p90_s for f in runs),
                1000 * median(f.tpot_mean_s for f in runs),
                median(f.hit_share for f in runs),
                median(f.num_errors for f in runs),
                1000 * median(f.lateness_p99_s for f in runs),
            )
        )
    return Table(
        f"{comparison.offered.factor:g} × round-robin's knee: {comparison.rate:.2f} requests/s "
        "(medians)",
        (
            "policy",
            "output tokens/s",
            "TTFT p50 s",
            "p90 s",
            "TPOT ms",
            "hits",
            "errors",
            "sent late p99 ms",
        ),
        tuple(rows),
    )


def _no_reuse_table(no_reuse: NoReuse, sizes: Sizes) -> Table:
    rows = []
    for policy, runs in no_reuse.figures.items():
        others = no_reuse.figures["round-robin"]
        ratios = paired_ratios([f.ttft_p90_s for f in runs], [f.ttft_p90_s for f in others])
        rows.append(
            (
                policy,
                median(f.output_tokens_per_s for f in runs),
                median(f.ttft_p50_s for f in runs),
                median(f.ttft_p90_s for f in runs),
                1000 * median(f.tpot_mean_s for f in runs),
                median(ratios),
            )
        )
    return Table(
        f"No reuse: prompts of {sizes.shape.prompt_tokens} tokens that share nothing, "
        f"{no_reuse.rate:.2f} requests/s (medians)",
        ("policy", "output tokens/s", "TTFT p50 s", "p90 s", "TPOT ms", "p90 ÷ round-robin's"),
        tuple(rows),
    )


def _cpu_note(cpu_shares: Sequence[tuple[float, float, float]]) -> str:
    router, engines, generator = (max(shares) for shares in zip(*cpu_shares, strict=True))
    return (
        f"CPU at most, of one core: router {100 * router:.0f} %, all engines together "
        f"{100 * engines:.0f} %, load generator {100 * generator:.0f} %"
    )
