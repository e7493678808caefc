"""Which engines hang: alive for the kernel, and of no use to anybody.

An engine hangs when no heartbeat has come for `silence_s` though there was one before, or when it
says that its step has taken longer than `max(silence_s, 5 × its own estimate)`. Silence counts only
while this router itself was awake: after a pause of its own process, all engines would look
silent at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvoy_router.endpoint import Endpoint, EngineInfo, LoadView

TICK_S = 0.25
"""How often `tick` is to be called."""
STEP_FACTOR = 5.0
_LONGEST_TICK_S = 2 * TICK_S


@dataclass(frozen=True, slots=True)
class Hang:
    endpoint: Endpoint
    since_s: float
    """When it was noticed."""
    reason: str


@dataclass(slots=True, eq=False)
class _Watched:
    endpoint: Endpoint
    load_s: float
    silent_s: float = 0.0
    hang: Hang | None = None


class HangWatch:
    """Time is seconds on the clock by which the endpoints' reports are stamped."""

    def __init__(self, silence_s: float = 3.0) -> None:
        self.silence_s = silence_s
        self._watched: dict[str, _Watched] = {}
        self._ticked_s: float | None = None

    def tick(self, endpoints: Iterable[Endpoint], now_s: float) -> list[Hang]:
        """Look again; all engines that hang now."""
        passed_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        passed_s = min(max(passed_s, 0.0), _LONGEST_TICK_S)
        self._ticked_s = now_s
        before, self._watched = self._watched, {}
        hangs = []
        for endpoint in endpoints:
            watched = before.get(endpoint.id)
            if watched is None or watched.endpoint is not endpoint:
                watched = _Watched(endpoint, endpoint.load_s)
            elif watched.load_s != endpoint.load_s:
                watched.load_s, watched.silent_s = endpoint.load_s, 0.0
            elif endpoint.load_s:
                watched.silent_s += passed_s
            self._watched[endpoint.id] = watched
            if (hang := self._judge(watched, now_s)) is not None:
                hangs.append(hang)
        return hangs

    def is_hung(self, endpoint: Endpoint) -> bool:
        watched = self._watched.get(endpoint.id)
        return watched is not None and watched.hang is not None

    def _judge(self, watched: _Watched, now_s: float) -> Hang | None:
        reason = self._reason(watched)
        if reason is None:
            watched.hang = None
        elif watched.hang is None:
            watched.hang = Hang(watched.endpoint, now_s, reason)
        return watched.hang

    def _reason(self, watched: _Watched) -> str | None:
        if watched.silent_s >= self.silence_s:
            return f"no heartbeat for {self.silence_s:g} s"
        load, info = watched.endpoint.load, watched.endpoint.info
        if load is None or info is None:
            return None
        limit_s = step_limit_s(load, info, self.silence_s)
        if limit_s is not None and load.last_step_age_s > limit_s:
            return f"its step has taken {load.last_step_age_s:.1f} s, more than {limit_s:.1f} s"
        return None


def step_limit_s(load: LoadView, info: EngineInfo, least_s: float) -> float | None:
    """How long the engine's step may take, by its own figures: a decode step and as much of its
    queued prefill as one step takes. None while it has not measured them."""
    if not load.step_time_s:
        return None
    estimate_s = load.step_time_s
    num_tokens = load.queued_prefill_tokens
    if num_tokens:
        if not load.prefill_tokens_per_s:
            return None
        if info.max_num_batched_tokens:
            num_tokens = min(num_tokens, info.max_num_batched_tokens)
        estimate_s += num_tokens / load.prefill_tokens_per_s
    return max(least_s, STEP_FACTOR * estimate_s)
