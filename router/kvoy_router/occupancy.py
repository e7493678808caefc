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


def occupancies(
    endpoints: Sequence[Endpoint], known: Sequence[bool], average: Occupancy | None = None
) -> list[Occupancy]:
    """One per endpoint. `known[i]` says whether the i-th one's report is to be believed.

    `average` is an average engine of the fleet, where the endpoints are a part of it.
    """
    result: list[Occupancy] = []
    for endpoint, is_known in zip(endpoints, known, strict=True):
        occupancy = measured(endpoint) if is_known else None
        if occupancy is None:
            return _beside_unknown_ones(endpoints, known, average)
        result.append(occupancy)
    return result


def measured(endpoint: Endpoint) -> Occupancy | None:
    """From its own report alone; None where it has not reported or measured enough for that."""
    kept = endpoint.occupancy
    if kept is not None and kept[0] == endpoint.ledger.version:
        return kept[1]
    load = endpoint.load
    if load is None or load.prefill_tokens_per_s <= 0.0 or load.step_time_s <= 0.0:
        return None
    occupancy = _reported(endpoint, load, load.prefill_tokens_per_s, load.step_time_s)
    endpoint.occupancy = (endpoint.ledger.version, occupancy)
    return occupancy


def average_of(
    known: Sequence[Occupancy], prefill_tokens_per_s: float = 0.0, step_s: float = 0.0
) -> Occupancy:
    """An average engine of a fleet: the mean of those that are known, idle where none is.

    The two rates, where given, are those that some have measured without being known otherwise.
    """

    def mean(name: str) -> float:
        return sum(getattr(o, name) for o in known) / len(known) if known else 0.0

    return Occupancy(
        is_known=False,
        running=mean("running"),
        waiting=mean("waiting"),
        queued_tokens=mean("queued_tokens"),
        context_tokens=mean("context_tokens"),
        free_tokens=mean("free_tokens"),
        evictable_tokens=mean("evictable_tokens"),
        total_tokens=mean("total_tokens"),
        max_running=mean("max_running"),
        prefill_tokens_per_s=prefill_tokens_per_s
        or mean("prefill_tokens_per_s")
        or DEFAULT_PREFILL_TOKENS_PER_S,
        step_s=mean("step_s") or step_s or DEFAULT_STEP_S,
        step_s_per_token=mean("step_s_per_token"),
    )


def _beside_unknown_ones(
    endpoints: Sequence[Endpoint], known: Sequence[bool], average: Occupancy | None
) -> list[Occupancy]:
    """Fills what some have not reported or measured with the mean of those that have."""
    if average is not None:
        rate, step_s = average.prefill_tokens_per_s, average.step_s
    else:
        loads = [
            load
            for e, is_known in zip(endpoints, known, strict=True)
            if is_known and (load := e.load)
        ]
        rate = _mean([load.prefill_tokens_per_s for load in loads]) or DEFAULT_PREFILL_TOKENS_PER_S
        step_s = _mean([load.step_time_s for load in loads]) or DEFAULT_STEP_S
    result = [
        _reported(e, e.load, e.load.prefill_tokens_per_s or rate, step_s)
        if is_known and e.load is not None
        else None
        for e, is_known in zip(endpoints, known, strict=True)
    ]
    if average is None:
        average = average_of([o for o in result if o is not None], rate, step_s)
    return [
        occupancy or _like(endpoint, average)
        for endpoint, occupancy in zip(endpoints, result, strict=True)
    ]


def _mean(values: Sequence[float]) -> float:
    """Of those that are not 0, and 0 when all are."""
    measured = [value for value in values if value > 0.0]
    return sum(measured) / len(measured) if measured else 0.0


def _reported(
    endpoint: Endpoint, load: LoadView, prefill_tokens_per_s: float, default_step_s: float
) -> Occupancy:
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
    step, slope = endpoint.step_law.at(context, default_step_s, load.total_blocks * block_size)
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
        prefill_tokens_per_s=prefill_tokens_per_s,
        step_s=step,
        step_s_per_token=slope,
    )


def _like(endpoint: Endpoint, average: Occupancy) -> Occupancy:
    """An average engine that is at least as busy as this router has made this one."""
    ledger, info = endpoint.ledger, endpoint.info
    waiting = max(average.waiting, float(ledger.unsettled))
    return msgspec.structs.replace(
        average,
        running=max(average.running, ledger.in_flight - waiting),
        waiting=waiting,
        queued_tokens=max(average.queued_tokens, ledger.unsettled_prefill_tokens),
        context_tokens=max(average.context_tokens, ledger.unsettled_context_tokens),
        max_running=info.max_num_seqs if info else average.max_running,
    )
