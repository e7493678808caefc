"""The router's check on itself: what it predicted beside what engines then did, and what its picks
save against plain round-robin.

Always on, so it costs additions per request and nothing else; `metrics` exposes it. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from kvoy_router.cost import Cost, Traffic, estimate
from kvoy_router.decision import Decision
from kvoy_router.policies import View
from kvoy_router.request import InferenceRequest

TTFT_SLACK_S = 0.05
"""Added to both sides of the ratio of times to first token: what nobody feels weighs little."""
CACHED_BOUNDS = (-0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1.0)
TTFT_BOUNDS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class Tally:
    """A histogram: counts of values up to each bound, and of those above all."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of the values."""

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> Iterable[tuple[float, int]]:
        """(bound, number of values up to it), ending with infinity."""
        return zip((*self._bounds, inf), accumulate(self._counts), strict=True)


class ModelAudit:
    __slots__ = ("added_tokens", "cached_error", "saved_tokens", "ttft_ratio")

    def __init__(self) -> None:
        self.cached_error = Tally(CACHED_BOUNDS)
        """Cached tokens as the engine counted them less those predicted, as a share of the
        prompt."""
        self.ttft_ratio = Tally(TTFT_BOUNDS)
        """Observed time to first token, by the predicted one."""
        self.saved_tokens = 0
        """Prompt tokens that the engine next in turn would have had to compute beyond those that
        the chosen one computes."""
        self.added_tokens = 0
        """The other way round, where the engine next in turn held more."""


class Audit:
    def __init__(self) -> None:
        self._models: dict[str, ModelAudit] = {}

    def on_answer(
        self, decision: Decision, cached_tokens: int | None, ttft_s: float | None
    ) -> None:
        """`cached_tokens` as the engine tells them; `ttft_s` from the decision to the first token.
        None: not told, or not observed."""
        audit = self._models.get(decision.model)
        if audit is None:
            audit = self._models[decision.model] = ModelAudit()
        if cached_tokens is not None:
            audit.cached_error.add(cached_error(decision, cached_tokens))
        if ttft_s is not None and decision.predicted_ttft_s is not None:
            ratio = (ttft_s + TTFT_SLACK_S) / (decision.predicted_ttft_s + TTFT_SLACK_S)
            audit.ttft_ratio.add(ratio)
        saved = decision.cached_tokens - decision.cached_tokens_in_turn
        if saved >= 0:
            audit.saved_tokens += saved
        else:
            audit.added_tokens -= saved

    def models(self) -> Iterable[tuple[str, ModelAudit]]:
        return self._models.items()

    def forget_model(self, model: str) -> None:
        self._models.pop(model, None)


def cached_error(decision: Decision, cached_tokens: int) -> float:
    """A share of the prompt, -1 to 1. The index knows whole strides and the engine whole blocks and
    at least one token to compute, so up to a stride is no error."""
    error = cached_tokens - decision.cached_tokens
    if abs(error) <= decision.stride:
        return 0.0
    return error / max(decision.prompt_tokens, 1)


def predicted_ttft_s(
    request: InferenceRequest, view: View, traffic: Traffic, cost: Cost | None
) -> float | None:
    """From a decision to the first token, None where the engine's load is not known. `cost`: what
    the policy has estimated of it, if it estimates."""
    if not view.occupancy.is_known:
        return None
    if cost is None:
        cost = estimate(request.num_prompt_tokens, view.cached_tokens, view.occupancy, traffic)
    return cost.wait_s + cost.prefill_s
