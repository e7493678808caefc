"""What was measured of each route, and how many measurements become one figure. Pure.

A request that failed counts in `num_failed` and in nothing else; where nothing came, figures are
NaN, which meets no goal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvoy_cli.bench.outcome import Outcome
from kvoy_cli.bench.stats import mean, median, percentile, ratio


@dataclass(frozen=True, slots=True)
class StreamCost:
    """Of one run of streams whose events come one by one."""

    cpu_us: float
    """Of the process in the middle, per event that carries text."""
    events_per_read: float
    num_failed: int


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Of one closed loop of requests that are not streamed."""

    requests_per_s: float
    cpu_us: float
    """Of the process in the middle, per request."""
    p50_ms: float
    p99_ms: float
    num_failed: int

    @property
    def requests_per_core_s(self) -> float:
        """How many requests one second of its CPU carries."""
        return ratio(1e6, self.cpu_us)


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Next turns of a conversation that the route has seen before."""

    alone: RequestCost
    """One user."""
    together: RequestCost
    """32 users, each with a conversation of its own."""
    prompt_tokens: float
    """As the route's own count says; NaN where it does not count."""


@dataclass(slots=True)
class RouteCosts:
    """All that was measured of one route on stand-in engines, repeat by repeat."""

    streams: list[StreamCost] = field(default_factory=list)
    requests: dict[int, list[RequestCost]] = field(default_factory=dict)
    """By concurrency."""
    turns: dict[int, list[TurnCost]] = field(default_factory=dict)
    """By tokens of history."""
    resident_mb: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Placement:
    """One mix of traffic through one route onto simulated engines."""

    ttft_p50_s: float
    ttft_p90_s: float
    tokens_per_s: float
    goodput: float
    """Requests a second that stayed inside the bounds on TTFT and time per token."""
    spread: float
    """Requests of the busiest engine over the mean of all; 1 is even."""
    hit_rate: float
    """Cached over all prompt tokens, by the engines' own counters."""
    num_requests: int
    num_failed: int

    @property
    def score(self) -> float:
        """Hit rate and spread together: the hit rate divided by the spread. Where there is nothing
        to reuse, evenness alone."""
        evenness = ratio(1.0, self.spread)
        return evenness * self.hit_rate if self.hit_rate > _NO_REUSE else evenness


_NO_REUSE = 0.05
"""Below it, what is hit is the chat template's own words."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """An engine's own totals."""

    requests: float
    prompt_tokens: float
    cached_tokens: float

    def since(self, before: EngineCounters) -> EngineCounters:
        return EngineCounters(
            self.requests - before.requests,
            self.prompt_tokens - before.prompt_tokens,
            self.cached_tokens - before.cached_tokens,
        )


_COUNTED = {
    "kvoy_engine_requests_total": "requests",
    "kvoy_engine_prompt_tokens_total": "prompt_tokens",
    "kvoy_engine_cached_tokens_total": "cached_tokens",
}


def parse_counters(text: str) -> EngineCounters:
    """From the engine's /metrics. Only requests that generated something are counted."""
    totals = dict.fromkeys(_COUNTED.values(), 0.0)
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("}") if rest else ("", "", "")
        if not rest:
            name, _, value = line.partition(" ")
        field_name = _COUNTED.get(name)
        if field_name is None:
            continue
        if field_name == "requests" and 'endpoint="chat' not in labels:
            continue
        totals[field_name] += float(value)
    return EngineCounters(**totals)


def spread_of(loads: Sequence[float]) -> float:
    """Greatest over mean; NaN where nobody got anything."""
    return ratio(max(loads), sum(loads) / len(loads))


def hit_rate_of(engines: Iterable[EngineCounters]) -> float:
    known = list(engines)
    return ratio(sum(e.cached_tokens for e in known), sum(e.prompt_tokens for e in known))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inside which a request is good."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05

    def are_kept_by(self, outcome: Outcome) -> bool:
        """Of an answer that the end of a run has cut, what had come of it counts."""
        if outcome.error is not None or outcome.ttft_s > self.ttft_s:
            return False
        gaps_s = outcome.gaps_s
        return not gaps_s or mean(gaps_s) <= self.tpot_s


def request_cost(outcomes: Sequence[Outcome], seconds: float, cpu_s: float) -> RequestCost:
    """Of a closed loop that was cut after `seconds`: what was still running then is not counted."""
    ok = [outcome for outcome in outcomes if outcome.is_ok]
    times_ms = [1000 * (outcome.end_s - outcome.sent_s) for outcome in ok]
    return RequestCost(
        requests_per_s=ratio(len(ok), seconds),
        cpu_us=ratio(1e6 * cpu_s, len(ok)),
        p50_ms=percentile(times_ms, 50),
        p99_ms=percentile(times_ms, 99),
        num_failed=sum(1 for outcome in outcomes if outcome.error is not None),
    )


def stream_cost(outcomes: Sequence[Outcome], cpu_s: float) -> StreamCost:
    num_events = sum(len(outcome.arrivals) for outcome in outcomes)
    return StreamCost(
        cpu_us=ratio(1e6 * cpu_s, num_events),
        events_per_read=ratio(num_events, sum(outcome.num_reads for outcome in outcomes)),
        num_failed=sum(1 for outcome in outcomes if outcome.error is not None),
    )


def added_ms(through: Sequence[float], directly: Sequence[float]) -> float:
    """Median of the differences, repeat by repeat."""
    return median(a - b for a, b in zip(through, directly, strict=True))


def best_of(scores: Mapping[str, float], without: str) -> tuple[str, float]:
    """The name and score of the best but one named; NaN scores are nobody's best."""
    others = {n: s for n, s in scores.items() if n != without and not math.isnan(s)}
    if not others:
        return "", math.nan
    name = max(others, key=others.__getitem__)
    return name, others[name]
