"""How long a step takes on this machine, learnt online, and how large a prefill chunk may be.

    seconds = base + a x decode rows + b x context tokens read + c x prefill tokens
                   + d x prefill tokens x their mean context

The five costs are fitted to the measured steps by recursive least squares. Errors count relative to
the step's time, so short and long steps teach alike and a hiccup of the machine weighs little. Old
knowledge fades only in the direction that a new step speaks about (directional forgetting): a long
stretch of decoding does not blur what prefill costs.

Pure: durations are arguments. The scheduler asks and teaches it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_SCALES = (1.0, 64.0, 1e4, 512.0, 1e6)
"""Features are divided by these, so that the costs are of comparable size."""
_PRIOR = (0.01, 0.002, 0.001, 0.25, 0.25)
"""Costs in seconds per scaled feature before anything was measured. The first step scales them all
to the machine's speed; their ratios are those of a CPU, so that the first chunk beside streams is
short."""
_PRIOR_WEIGHT = 0.003
"""Where a measured step's is about 1: the prior gives way at once to what was seen."""
_KEEP = 0.97
"""Share of the old knowledge kept at each step: about the last 30 steps of a kind count."""
_LEAST_EXTRAPOLATION = 64
_SMOOTHING = 0.1
_SURPRISE = 20.0
_MOVE = 0.3
_MOST_MOVE = 0.15
"""Logarithm of how far one step moves the smoothed step time at most: a hiccup of the machine is
forgotten in a step or two."""
_ERROR_MARGIN = 1.5
"""Mean absolute errors that a bound leaves below itself."""
_GROWTH_MARGIN = 1.1
"""Of the latest decode steps' time, for the growth of context between two of them."""
_REFERENCE_CHUNK = 512
_LEAST_PIVOT = 1e-12


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a batch its time depends on."""

    num_decodes: int = 0
    decode_context: int = 0
    """Context tokens that the decodes read, their own included."""
    prefill_tokens: int = 0
    prefill_context: int = 0
    """Context tokens that the chunks read: for each its end position."""
    prefill_work: float = 0.0
    """Sum over chunks of tokens x mean context, `n * (start + n / 2)`."""


class PaceModel:
    """Not thread-safe; owned by the scheduler."""

    def __init__(self) -> None:
        self._costs = list(_PRIOR)
        self._information: list[list[float]] = []
        self._largest_chunk = 0
        self._step_time_s = 0.0
        self._decode_shape = StepShape()
        """Of the latest step that only decoded."""
        self._error = 1.0
        """Smoothed relative error of the estimates, 0 .. 1."""

    @property
    def step_time_s(self) -> float:
        """Smoothed time of the steps that only decode; 0.0 until there was one."""
        return self._step_time_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of a chunk of 512 tokens that is alone in its step; 0.0 until there was a
        prefill."""
        if not self._largest_chunk:
            return 0.0
        n = _REFERENCE_CHUNK
        alone = StepShape(prefill_tokens=n, prefill_context=n, prefill_work=n * n / 2)
        return n / max(self.estimate_s(alone), 1e-9)

    def estimate_s(self, shape: StepShape) -> float:
        return max(_dot(self._costs, _features(shape)), 1e-6)

    def allowance_s(self, shape: StepShape, ratio: float) -> float:
        """Seconds that prefill may add to these decodes for a step of at most `ratio` times their
        time.

        As much less as estimates are off on this machine, so that few steps go over, but at least
        half of what exact estimates would allow: prefill must not starve.
        """
        slack = ratio / (1 + _ERROR_MARGIN * self._error) - 1
        return max(slack, (ratio - 1) / 2) * min(self.estimate_s(shape), self._most_s(shape))

    def _most_s(self, shape: StepShape) -> float:
        """More than these decodes can take, by the latest steps that only decoded: time grows at
        most in proportion to rows and context. Bounds a fit that a disturbed machine has led
        astray.
        """
        if not self._step_time_s:
            return math.inf
        then = self._decode_shape
        growth = max(
            shape.num_decodes / then.num_decodes, shape.decode_context / then.decode_context, 1.0
        )
        return _GROWTH_MARGIN * growth * self._step_time_s

    def chunk_limit(self, allowance_s: float, start: int) -> int:
        """Tokens of the largest chunk from position `start` that adds at most `allowance_s` to a
        step.

        At most twice the largest chunk seen: beyond that the fitted line is a guess.
        """
        b, c, d = self._chunk_costs()
        largest = max(2 * self._largest_chunk, _LEAST_EXTRAPOLATION)
        left = allowance_s - b * start
        if left <= 0:
            return 0
        # d/2 n^2 + (b + c + d start) n = left, for its positive root; written so that d may be 0.
        linear = b + c + d * start
        root = linear + math.sqrt(linear * linear + 2 * d * left)
        return largest if root * largest <= 2 * left else int(2 * left / root)

    def chunk_s(self, start: int, num_tokens: int) -> float:
        """Time that a chunk adds to a step."""
        b, c, d = self._chunk_costs()
        work = num_tokens * (start + num_tokens / 2)
        return b * (start + num_tokens) + c * num_tokens + d * work

    def _chunk_costs(self) -> tuple[float, float, float]:
        """Seconds of a chunk per context token, prefill token and product of the two. One below
        zero is noise, and would let a chunk grow without bound."""
        b, c, d = (max(self._costs[i] / _SCALES[i], 0.0) for i in (2, 3, 4))
        return b, c, d

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Learn from one measured step; a duration of 0 or less says nothing and is left out."""
        if duration_s <= 0:
            return
        if shape.prefill_tokens:
            self._largest_chunk = max(self._largest_chunk, shape.prefill_tokens)
        elif shape.num_decodes:
            self._learn_decode(shape, duration_s)
        features = _features(shape)
        if not self._information:
            self._start_at(duration_s / self.estimate_s(shape))
        estimate_s = self.estimate_s(shape)
        # Relative to the estimate. Where estimates have been good, a step of many times its length
        # must be a hiccup of the machine and weighs less; where they have been bad, it is news.
        scale = max(estimate_s, duration_s / (2 + _SURPRISE * self._error))
        error = abs(duration_s - estimate_s) / max(duration_s, estimate_s)
        self._error += _SMOOTHING * (error - self._error)
        self._fit([x / scale for x in features], duration_s / scale)

    def _learn_decode(self, shape: StepShape, duration_s: float) -> None:
        if not self._step_time_s:
            self._step_time_s = duration_s
        error = math.log(duration_s / self._step_time_s)
        self._step_time_s *= math.exp(max(-_MOST_MOVE, min(_MOST_MOVE, _MOVE * error)))
        self._decode_shape = shape

    def _start_at(self, factor: float) -> None:
        self._costs = [cost * factor for cost in self._costs]
        size = range(len(self._costs))
        self._information = [
            [_PRIOR_WEIGHT / self._costs[i] ** 2 if i == j else 0.0 for j in size] for i in size
        ]

    def _fit(self, x: list[float], y: float) -> None:
        info = self._information
        # A step with prefill fades what is known of prefill alone: else a long prompt, whose chunks
        # grow dearer with their context, would slowly teach that decodes had grown dearer.
        faded = [0.0, 0.0, 0.0, x[3], x[4]] if x[3] else x
        pull = [_dot(row, faded) for row in info]
        fade = (1 - _KEEP) / _dot(faded, pull)
        for i, row in enumerate(info):
            x_i, fade_i = x[i], fade * pull[i]
            info[i] = [
                known + (x_i * x_j - fade_i * pull_j)
                for known, x_j, pull_j in zip(row, x, pull, strict=True)
            ]
        error = y - _dot(self._costs, x)
        change = _solve(info, x)
        self._costs = [
            cost + error * delta for cost, delta in zip(self._costs, change, strict=True)
        ]


def _dot(a: list[float], b: list[float]) -> float:
    """Written out: a step's fit takes a good part of a simulated engine's time otherwise."""
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3] + a[4] * b[4]


def _features(shape: StepShape) -> list[float]:
    context = shape.decode_context + shape.prefill_context
    return [
        1.0,
        shape.num_decodes / _SCALES[1],
        context / _SCALES[2],
        shape.prefill_tokens / _SCALES[3],
        shape.prefill_work / _SCALES[4],
    ]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a symmetric positive definite system of five equations by Cholesky's factors."""
    (m00, *_), (m10, m11, *_), (m20, m21, m22, *_), (m30, m31, m32, m33, _), last = matrix
    m40, m41, m42, m43, m44 = last
    l00 = math.sqrt(max(m00, _LEAST_PIVOT))
    l10, l20, l30, l40 = m10 / l00, m20 / l00, m30 / l00, m40 / l00
    l11 = math.sqrt(max(m11 - l10 * l10, _LEAST_PIVOT))
    l21, l31, l41 = (m21 - l20 * l10) / l11, (m31 - l30 * l10) / l11, (m41 - l40 * l10) / l11
    l22 = math.sqrt(max(m22 - l20 * l20 - l21 * l21, _LEAST_PIVOT))
    l32 = (m32 - l30 * l20 - l31 * l21) / l22
    l42 = (m42 - l40 * l20 - l41 * l21) / l22
    l33 = math.sqrt(max(m33 - l30 * l30 - l31 * l31 - l32 * l32, _LEAST_PIVOT))
    l43 = (m43 - l40 * l30 - l41 * l31 - l42 * l32) / l33
    l44 = math.sqrt(max(m44 - l40 * l40 - l41 * l41 - l42 * l42 - l43 * l43, _LEAST_PIVOT))
    b0 = right[0] / l00
    b1 = (right[1] - l10 * b0) / l11
    b2 = (right[2] - l20 * b0 - l21 * b1) / l22
    b3 = (right[3] - l30 * b0 - l31 * b1 - l32 * b2) / l33
    b4 = (right[4] - l40 * b0 - l41 * b1 - l42 * b2 - l43 * b3) / l44
    x4 = b4 / l44
    x3 = (b3 - l43 * x4) / l33
    x2 = (b2 - l32 * x3 - l42 * x4) / l22
    x1 = (b1 - l21 * x2 - l31 * x3 - l41 * x4) / l11
    x0 = (b0 - l10 * x1 - l20 * x2 - l30 * x3 - l40 * x4) / l00
    return [x0, x1, x2, x3, x4]
