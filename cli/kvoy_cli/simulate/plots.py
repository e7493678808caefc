"""Plots of one simulation over its virtual time, as PNG and SVG. Needs the extra `simulate`.

One file per figure. Points of requests stand at their arrival; rates and hit rates are means over
slices of five seconds; load is one line per engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvoy_simulate.intervals import percentile
from kvoy_simulate.measures import output_rate, time_to_first_token
from kvoy_simulate.outcome import Outcome

SLICE_S = 5.0
_MAX_LABELLED_ENGINES = 12


def write_plots(outcome: Outcome, folder: Path) -> list[Path]:
    """The files that were written. Raises OSError when the folder cannot be written to."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for name, (label, draw) in _PLOTS.items():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.subplots()
        draw(axes, outcome)
        axes.axvspan(0, outcome.warmup_s, color="0.93", label="warm-up")
        axes.set(xlabel="virtual time, s", ylabel=label, xlim=(0, outcome.duration_s))
        axes.set_ylim(bottom=0)
        axes.set_title(f"{outcome.policy}, seed {outcome.seed}", loc="left", fontsize="medium")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", loc="upper left")
        for kind in ("png", "svg"):
            file = folder / f"{name}.{kind}"
            figure.savefig(file, dpi=120, metadata={"Date": None} if kind == "svg" else None)
            files.append(file)
    return files


def _ttft(axes: Axes, outcome: Outcome) -> None:
    rows = outcome.requests
    waits_s = [time_to_first_token(outcome, i) for i in range(len(rows))]
    axes.plot(rows.arrival_s, waits_s, ".", markersize=2, alpha=0.4, label="requests")
    for q in (50, 90):
        axes.plot(*_sliced(outcome, rows.arrival_s, waits_s, q), label=f"p{q}")


def _tpot(axes: Axes, outcome: Outcome) -> None:
    rows = outcome.requests
    ended = [
        i
        for i in range(len(rows))
        if rows.output_tokens[i] > 1 and not math.isnan(rows.end_s[i] - rows.first_token_s[i])
    ]
    at_s = [rows.arrival_s[i] for i in ended]
    pace_s = [(rows.end_s[i] - rows.first_token_s[i]) / (rows.output_tokens[i] - 1) for i in ended]
    axes.plot(at_s, pace_s, ".", markersize=2, alpha=0.4, label="requests")
    for q in (50, 90):
        axes.plot(*_sliced(outcome, at_s, pace_s, q), label=f"p{q}")


def _throughput(axes: Axes, outcome: Outcome) -> None:
    starts = _slices(outcome)
    rates = [output_rate(outcome, start, start + SLICE_S) for start in starts]
    axes.plot([start + SLICE_S / 2 for start in starts], rates, label="all engines")


def _hit_rate(axes: Axes, outcome: Outcome) -> None:
    rows = outcome.requests
    shares = [
        cached / prompt
        for cached, prompt in zip(rows.cached_tokens, rows.prompt_tokens, strict=True)
    ]
    answered = [i for i, at_s in enumerate(rows.first_token_s) if not math.isnan(at_s)]
    middles: list[float] = []
    means: list[float] = []
    for start in _slices(outcome):
        inside = [shares[i] for i in answered if start <= rows.first_token_s[i] < start + SLICE_S]
        if inside:
            middles.append(start + SLICE_S / 2)
            means.append(sum(inside) / len(inside))
    axes.plot(middles, means, label="mean over requests")


def _load(axes: Axes, outcome: Outcome) -> None:
    is_labelled = len(outcome.engines) <= _MAX_LABELLED_ENGINES
    for engine in outcome.engines:
        load = [a + b for a, b in zip(engine.running, engine.waiting, strict=True)]
        label = engine.name if is_labelled else None
        axes.plot(engine.times_s, load, linewidth=1, label=label)


def _memory(axes: Axes, outcome: Outcome) -> None:
    is_labelled = len(outcome.engines) <= _MAX_LABELLED_ENGINES
    for engine in outcome.engines:
        used = [blocks / engine.total_blocks for blocks in engine.used_blocks]
        label = engine.name if is_labelled else None
        axes.plot(engine.times_s, used, linewidth=1, label=label)


_PLOTS: dict[str, tuple[str, Callable[[Axes, Outcome], None]]] = {
    "ttft": ("time to first token, s", _ttft),
    "tpot": ("time per output token, s", _tpot),
    "throughput": ("output tokens/s", _throughput),
    "hit-rate": ("share of prompt tokens found in caches", _hit_rate),
    "load": ("requests running and waiting at each engine", _load),
    "memory": ("share of each engine's KV blocks in use", _memory),
}


def _slices(outcome: Outcome) -> list[float]:
    return [SLICE_S * i for i in range(int(outcome.duration_s // SLICE_S))]


def _sliced(
    outcome: Outcome, at_s: Sequence[float], values: Sequence[float], q: float
) -> tuple[list[float], list[float]]:
    """The percentile of each slice that has values, at the slice's middle."""
    by_slice: dict[int, list[float]] = {}
    for time_s, value in zip(at_s, values, strict=True):
        by_slice.setdefault(int(time_s // SLICE_S), []).append(value)
    numbers = sorted(number for number in by_slice if number * SLICE_S < outcome.duration_s)
    middles = [(number + 0.5) * SLICE_S for number in numbers]
    return middles, [percentile(by_slice[number], q) for number in numbers]
