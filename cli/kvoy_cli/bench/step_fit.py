"""A step law fitted to measured times, by least squares. Pure.

What was measured is a number of steps that together took some seconds; the law says

    seconds = steps × base + prefill tokens ÷ rate + context tokens × cost + rows × cost
              + requests × overhead

Errors count relative to the measured time, so that short steps weigh as much as long ones. A term
that comes out negative is taken for zero and the others are fitted again: no part of a step gives
time back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoy_engine.step_log import LoggedStep
from kvoy_engine.timing_model import TimingModel

MAX_PREFILL_TOKENS_PER_S = 1e9
"""Stands for prefill that takes no time of its own."""


@dataclass(frozen=True, slots=True)
class Observation:
    seconds: float
    steps: float
    prefill_tokens: float = 0.0
    context_tokens: float = 0.0
    """Over all steps, the end position of every row."""
    rows: float = 0.0
    requests: float = 0.0
    """Whose time outside of steps (HTTP, queues) is in `seconds`."""

    @property
    def terms(self) -> tuple[float, ...]:
        return (self.steps, self.prefill_tokens, self.context_tokens, self.rows, self.requests)


def windows(
    steps: Sequence[LoggedStep], size: int = 8, longest_pause_s: float = 0.02
) -> list[Observation]:
    """So many steps at a time that followed each other, with what passed between them. A longer
    pause is the engine's own: it had nothing to do. Times of single steps vary by what else the
    machine does; sums of a few are what queues are made of."""
    found: list[Observation] = []
    run: list[LoggedStep] = []

    def close() -> None:
        if run:
            found.append(
                Observation(
                    seconds=run[-1].end_s - run[0].begin_s,
                    steps=len(run),
                    prefill_tokens=sum(step.prefill_tokens for step in run),
                    context_tokens=sum(step.context_tokens for step in run),
                    rows=sum(step.rows for step in run),
                )
            )
            run.clear()

    for step in steps:
        if len(run) == size or (run and step.begin_s - run[-1].end_s > longest_pause_s):
            close()
        run.append(step)
    close()
    return found


@dataclass(frozen=True, slots=True)
class StepLaw:
    timing: TimingModel
    overhead_s: float
    """Per request, outside of steps."""

    def seconds(self, observation: Observation) -> float:
        timing = self.timing
        return (
            observation.steps * timing.base_s
            + observation.prefill_tokens / timing.prefill_tokens_per_s
            + observation.context_tokens * timing.context_token_s
            + observation.rows * timing.row_s
            + observation.requests * self.overhead_s
        )

    def errors(self, observations: Sequence[Observation]) -> list[float]:
        """How far the law is off, relative to what was measured."""
        return [self.seconds(o) / o.seconds - 1.0 for o in observations]


def fit(observations: Sequence[Observation]) -> StepLaw:
    """Raises ValueError when a measured time is not above 0 or nothing can be told apart."""
    if any(not observation.seconds > 0 for observation in observations):
        raise ValueError("every measured time must be above 0 seconds")
    rows = [[term / o.seconds for term in o.terms] for o in observations]
    free = [i for i in range(5) if any(row[i] for row in rows)]
    values = [0.0] * 5
    while free:
        solved = _least_squares([[row[i] for i in free] for row in rows])
        lowest = min(range(len(free)), key=lambda at: solved[at])
        if solved[lowest] >= 0.0:
            for i, value in zip(free, solved, strict=True):
                values[i] = value
            break
        del free[lowest]
    base_s, prefill_s, context_s, row_s, overhead_s = values
    rate = min(1.0 / prefill_s, MAX_PREFILL_TOKENS_PER_S) if prefill_s else MAX_PREFILL_TOKENS_PER_S
    return StepLaw(TimingModel(base_s, rate, context_s, row_s), overhead_s)


def fit_sum(observations: Sequence[Observation]) -> StepLaw:
    """As `fit`, stretched so that all together take as long as they took. Relative errors make
    little of a step that a busy machine held up, but whoever waits behind it does not. Raises
    ValueError as `fit` does."""
    law = fit(observations)
    factor = sum(o.seconds for o in observations) / sum(map(law.seconds, observations))
    timing = law.timing
    stretched = TimingModel(
        base_s=factor * timing.base_s,
        prefill_tokens_per_s=timing.prefill_tokens_per_s / factor,
        context_token_s=factor * timing.context_token_s,
        row_s=factor * timing.row_s,
    )
    return StepLaw(stretched, factor * law.overhead_s)


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """The x that minimises Σ (row · x − 1)², by the normal equations with columns scaled to unit
    length. Raises ValueError when columns depend on each other."""
    size = len(rows[0])
    scale = [sum(row[i] ** 2 for row in rows) ** 0.5 for i in range(size)]
    scaled = [[row[i] / scale[i] for i in range(size)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)]
        + [sum(row[i] for row in scaled)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda at: abs(matrix[at][i]))
        if abs(matrix[pivot][i]) < 1e-9:
            raise ValueError("the measurements do not tell the parts of a step apart")
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for below in range(i + 1, size):
            factor = matrix[below][i] / matrix[i][i]
            for j in range(i, size + 1):
                matrix[below][j] -= factor * matrix[i][j]
    solved = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * solved[j] for j in range(i + 1, size))
        solved[i] = (matrix[i][size] - rest) / matrix[i][i]
    return [value / scale[i] for i, value in enumerate(solved)]
