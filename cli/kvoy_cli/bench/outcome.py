"""What a client saw of one request: times, tokens, errors. Pure values and figures over many of
them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvoy_cli.bench.stats import mean, median, percentile


@dataclass(slots=True, eq=False)
class Outcome:
    """One request as its client saw it; all times are seconds on `time.perf_counter`."""

    due_s: float
    """When the schedule wanted it sent."""
    sent_s: float = math.nan
    end_s: float = math.nan
    """The last byte, the error, or the moment when the run gave up on it."""
    status: int = 0
    error: str | None = None
    is_cut: bool = False
    """The run ended, or its client went away, before the answer did."""
    arrivals: list[float] = field(default_factory=list)
    """When each event that carries text (or, not streamed, the whole answer) arrived."""
    token_ids: list[int] = field(default_factory=list)
    """Only where the server was asked for them."""
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """As usage reports; the response header may be a router's prediction."""
    engine: str = ""
    predicted_cached_tokens: int | None = None
    num_reads: int = 0
    """Reads from the socket that brought such events."""
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    body: bytes = b""
    """Of a non-streamed answer or an error."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_ok(self) -> bool:
        return self.error is None and not self.is_cut and self.status == 200

    @property
    def ttft_s(self) -> float:
        """From the scheduled start, so that a late generator counts against the figures; inf:
        never."""
        return self.arrivals[0] - self.due_s if self.arrivals else math.inf

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s if self.is_ok else math.inf

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; NaN for fewer than two tokens."""
        if not self.is_ok or self.completion_tokens < 2 or not self.arrivals:
            return math.nan
        return (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)

    def tokens_between(self, start_s: float, end_s: float) -> float:
        """Output tokens that arrived in [start_s, end_s): by event, scaled where usage is known."""
        count = sum(1 for at in self.arrivals if start_s <= at < end_s)
        if self.completion_tokens and self.arrivals:
            return count * self.completion_tokens / len(self.arrivals)
        return float(count)

    def gaps_between(self, start_s: float, end_s: float) -> list[float]:
        """Gaps that end in [start_s, end_s)."""
        return [b - a for a, b in pairwise(self.arrivals) if start_s <= b < end_s]


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures of one run over many outcomes. Times in seconds, rates per second."""

    num_requests: int
    num_ok: int
    num_errors: int
    num_cut: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    e2e_p50_s: float
    hit_share: float
    """Cached prompt tokens over all prompt tokens, of the requests that ended well."""
    lateness_p99_s: float
    """How far behind its schedule the generator sent: its own distortion."""


def summarise(outcomes: Sequence[Outcome], start_s: float, end_s: float) -> LoadFigures:
    """Figures of the requests that were due in [start_s, end_s), and of the tokens that arrived
    in it.

    A request that never answered counts with an infinite time to first token: an overloaded
    server cannot better its percentiles by leaving requests unanswered.
    """
    due = [outcome for outcome in outcomes if start_s <= outcome.due_s < end_s]
    ok = [outcome for outcome in due if outcome.is_ok]
    seconds = end_s - start_s
    ttfts = [outcome.ttft_s for outcome in due]
    return LoadFigures(
        num_requests=len(due),
        num_ok=len(ok),
        num_errors=sum(1 for outcome in due if outcome.error is not None),
        num_cut=sum(1 for outcome in due if outcome.is_cut),
        requests_per_s=sum(1 for o in outcomes if o.is_ok and start_s <= o.end_s < end_s) / seconds,
        output_tokens_per_s=tokens_per_s(outcomes, start_s, end_s),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p90_s=percentile(ttfts, 90),
        ttft_p99_s=percentile(ttfts, 99),
        tpot_mean_s=mean([t for o in ok if not math.isnan(t := o.tpot_s)]),
        e2e_p50_s=median(outcome.e2e_s for outcome in due),
        hit_share=_hit_share(ok),
        lateness_p99_s=percentile((o.sent_s - o.due_s for o in due if o.sent_s == o.sent_s), 99),
    )


def tokens_per_s(outcomes: Iterable[Outcome], start_s: float, end_s: float) -> float:
    return sum(o.tokens_between(start_s, end_s) for o in outcomes) / (end_s - start_s)


def _hit_share(outcomes: Sequence[Outcome]) -> float:
    prompt_tokens = sum(outcome.prompt_tokens for outcome in outcomes)
    if not prompt_tokens:
        return math.nan
    return sum(outcome.cached_tokens for outcome in outcomes) / prompt_tokens
