"""What it costs, in seconds, to send one request to one engine.

The unit is a second that somebody waits: the request itself, or any other request that it delays. A
decision minimises the sum over all of them, so every term has the same unit and no weights are
needed:

    wait      until the engine turns to this prompt
    prefill   of the part of the prompt that the engine does not hold
    decode    of the answer, at the engine's own step time
    harm      to others: this prefill stalls everyone who is there, and this context makes each of
              their steps longer
    evict     what is lost when the new blocks displace others that will be wanted again

`docs/routing.md` derives them.
"""

from __future__ import annotations

import msgspec

from kvoy_router.occupancy import Occupancy

PRESSURE_EXPONENT = 4
"""How sharply displaced blocks gain value as an engine fills: nothing is lost while much is
free."""


class Traffic(msgspec.Struct, frozen=True, gc=False):
    """What the pool has learnt about the requests of one model."""

    output_tokens: float
    """Expected length of this request's answer."""
    reuse: float
    """Share of prompt tokens that some engine held already: what a kept block is likely to be
    worth."""


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Seconds. The terms are reasons, for logs and `/debug/decisions`."""

    total_s: float
    wait_s: float
    prefill_s: float
    decode_s: float
    harm_s: float
    evict_s: float


def estimate(
    prompt_tokens: int, cached_tokens: int, occupancy: Occupancy, traffic: Traffic
) -> Cost:
    o = occupancy
    rate = o.prefill_tokens_per_s
    output = traffic.output_tokens
    uncached = max(prompt_tokens - cached_tokens, 1)
    prefill_s = uncached / rate
    others = o.running + o.waiting
    step_growth_s = o.step_s_per_token * (prompt_tokens + output / 2)

    wait_s = o.queued_tokens / rate + o.step_s + _slot_wait_s(uncached, o, output)
    decode_s = output * (o.step_s + step_growth_s)
    harm_s = prefill_s * others + output * step_growth_s * _running_soon(o)
    evict_s = _evicted_tokens(uncached + output, o, traffic.reuse) / rate * (1.0 + others)
    return Cost(
        total_s=wait_s + prefill_s + decode_s + harm_s + evict_s,
        wait_s=wait_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        harm_s=harm_s,
        evict_s=evict_s,
    )


def _running_soon(o: Occupancy) -> float:
    """Sequences whose steps a further one would share."""
    others = o.running + o.waiting
    return min(others, o.max_running) if o.max_running else others


def _slot_wait_s(uncached: int, o: Occupancy, output: float) -> float:
    """Time until running sequences have made room for this one, where seats or memory are short.

    Sequences end at the rate running ÷ (output × step); each that has to end before this one can
    run costs one such interval."""
    queue = o.waiting + 1.0
    excess = 0.0
    if o.max_running:
        excess = o.running + queue - o.max_running
    if o.total_tokens:
        needed = o.queued_tokens + uncached + queue * output
        short = needed - o.free_tokens - o.evictable_tokens
        if short > 0.0:
            excess = max(excess, queue * short / needed)
    if excess <= 0.0:
        return 0.0
    return min(excess, queue) * output * o.step_s / max(o.running, 1.0)


def _evicted_tokens(new_tokens: float, o: Occupancy, reuse: float) -> float:
    """Tokens of cached work lost, each weighed by the chance that somebody wants it again."""
    if not o.total_tokens or not reuse:
        return 0.0
    spare = o.free_tokens + (1.0 - reuse) * o.evictable_tokens
    pressure = 1.0 - min(max(spare - new_tokens, 0.0) / o.total_tokens, 1.0)
    return new_tokens * reuse * pressure**PRESSURE_EXPONENT
