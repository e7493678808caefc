"""How busy an engine is at this moment, as well as this router can tell.

That is the engine's last report, plus what this router has sent that the report does not include,
minus what has ended since. Where nothing is known an engine is taken for an average one of its
fleet, and for at least as busy as this router itself has made it: neither starved nor flooded."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvoy_router.endpoint import Endpoint, LoadView

DEFAULT_PREFILL_TOKENS_PER_S = 8_000.0
DEFAULT_STEP_S = 0.02
"""For a fleet in which no engine has measured anything yet. Equal for all, so it decides nothing
alone."""


class Occupancy(msgspec.Struct, frozen=True, gc=False):
    """Sizes in tokens, times in seconds."""

    is_known: bool
    running: float
    """Sequences that decode."""
    waiting: float
    """Sequences that do not yet: queued at the engine, or on their way to it."""
    queued_tokens: float
    """Prompt tokens that will be computed before a request that is sent now."""
    context_tokens: float
    """What a decode step reads."""
    free_tokens: float
    evictable_tokens: float
    total_tokens: float
    """0: not told."""
    max_running: float
    """0: not told."""
    prefill_tokens_per_s: float
    step_s: float
    """Of a decode step at this context."""
    step_s_per_token: float
    """What each further token of context adds to a step."""

    @property
    def num_requests(self) -> float:
        return self.running + self.waiting


def occupancies(endpoints: Sequence[Endpoint], known: Sequence[bool]) -> list[Occupancy]:
    """One per endpoint. `known[i]` says whether the i-th one's report is to be believed."""
    reports = [e.load for e, is_known in zip(endpoints, known, strict=True) if is_known]
    rates = [r.prefill_tokens_per_s for r in reports if r and r.prefill_tokens_per_s > 0.0]
    steps = [r.step_time_s for r in reports if r and r.step_time_s > 0.0]
    fleet_rate = sum(rates) / len(rates) if rates else DEFAULT_PREFILL_TOKENS_PER_S
    fleet_step = sum(steps) / len(steps) if steps else DEFAULT_STEP_S

    result: list[Occupancy | None] = [
        _known(endpoint, endpoint.load, fleet_rate, fleet_step)
        if is_known and endpoint.load is not None
        else None
        for endpoint, is_known in zip(endpoints, known, strict=True)
    ]
    believed = [occupancy for occupancy in result if occupancy is not None]
    if len(believed) == len(result):
        return believed
    return [
        occupancy or _unknown(endpoint, believed, fleet_rate, fleet_step)
        for endpoint, occupancy in zip(endpoints, result, strict=True)
    ]


def _known(endpoint: Endpoint, load: LoadView, fleet_rate: float, fleet_step: float) -> Occupancy:
    ledger = endpoint.ledger
    info = endpoint.info
    block_size = info.block_size if info else 16
    ended_running = min(ledger.ended, load.running)
    queued = load.queued_prefill_tokens - ledger.ended_prefill_tokens
    queued = (queued if queued > 0 else 0) + ledger.unsettled_prefill_tokens
    context = load.running_tokens - ledger.ended_context_tokens
    context = (context if context > 0 else 0) + ledger.unsettled_context_tokens
    free = load.free_blocks * block_size - ledger.unsettled_prefill_tokens
    evictable = load.evictable_blocks * block_size
    if free < 0:
        evictable = max(0, evictable + free)
        free = 0
    step, slope = endpoint.step_law.at(context, fleet_step, load.total_blocks * block_size)
    return Occupancy(
        is_known=True,
        running=load.running - ended_running,
        waiting=max(0, load.waiting - (ledger.ended - ended_running)) + ledger.unsettled,
        queued_tokens=queued,
        context_tokens=context,
        free_tokens=free,
        evictable_tokens=evictable,
        total_tokens=load.total_blocks * block_size,
        max_running=info.max_num_seqs if info else 0,
        prefill_tokens_per_s=load.prefill_tokens_per_s or fleet_rate,
        step_s=step,
        step_s_per_token=slope,
    )


def _unknown(
    endpoint: Endpoint, believed: Sequence[Occupancy], fleet_rate: float, fleet_step: float
) -> Occupancy:
    def mean(name: str) -> float:
        return sum(getattr(o, name) for o in believed) / len(believed) if believed else 0.0

    ledger = endpoint.ledger
    own = ledger.in_flight
    waiting = max(mean("waiting"), float(ledger.unsettled))
    return Occupancy(
        is_known=False,
        running=max(mean("running"), own - waiting),
        waiting=waiting,
        queued_tokens=max(mean("queued_tokens"), ledger.unsettled_prefill_tokens),
        context_tokens=max(mean("context_tokens"), ledger.unsettled_context_tokens),
        free_tokens=mean("free_tokens"),
        evictable_tokens=mean("evictable_tokens"),
        total_tokens=mean("total_tokens"),
        max_running=float(endpoint.info.max_num_seqs) if endpoint.info else mean("max_running"),
        prefill_tokens_per_s=fleet_rate,
        step_s=mean("step_s") or fleet_step,
        step_s_per_token=mean("step_s_per_token"),
    )
