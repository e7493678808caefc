"""What it costs, in seconds, to send one request to one engine.

The unit is a second that somebody waits for a first token: this request, or another one that it
delays. A decision minimises the sum over all of them:

    wait      until the engine turns to this prompt
    prefill   of the part of the prompt that the engine does not hold
    decode    of the answer, at the engine's own step time
    harm      to others: this prefill delays everyone who is there, and this context makes each of
              their steps longer
    evict     what is lost when the new blocks displace others that will be wanted again
    later     of a prompt that is new to the whole fleet: the uses to come meet all that has its
              home on the same engine, more or less than on an average one

`docs/routing.md` derives them.
"""

from __future__ import annotations

import msgspec

from kvoy_router.occupancy import Occupancy

DECODE_WEIGHT = 0.2
"""Seconds before the first token that weigh as much as one second spread over an answer. Who
streams sees a delay as slightly slower text; who waits sees nothing at all. It is also what tells
"this engine is overloaded" from "all are": extra work is cheap while others stream and dear when
they queue."""


PROMPT_STAY = 4.0
"""How many times as long as an answer's blocks those of a prompt stay: they are wanted again, which
keeps them from eviction, so they displace others not once but as long as they are used. It makes
new prefixes go where there is room for them, beyond the queue of the moment. Found by simulation;
2 to 8 differ little."""


LATER_USES = 8.0
"""Uses to come of a prompt that is new to the fleet, of which an imbalance of homes makes each wait
longer."""


class Traffic(msgspec.Struct, frozen=True, gc=False):
    """What the pool has learnt about the requests of one model."""

    output_tokens: float
    """Expected length of this request's answer."""
    reuse: float
    """Share of prompt tokens that some engine held already: what a kept block is likely worth."""
    mean_requests: float | None = None
    """Requests at an engine of the fleet, the busiest one left out. None where a policy sees the
    whole fleet and can tell for itself."""


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Seconds. The terms are reasons, for logs and `/debug/decisions`."""

    total_s: float
    wait_s: float
    prefill_s: float
    decode_s: float
    harm_s: float
    evict_s: float
    later_s: float = 0.0


def estimate(
    prompt_tokens: int,
    cached_tokens: int,
    occupancy: Occupancy,
    traffic: Traffic,
    mean_requests: float = 0.0,
    home_share: float = 1.0,
) -> Cost:
    """`mean_requests` is the mean of `Occupancy.num_requests` over all but the busiest candidate.
    `home_share` is what has its home on this engine, 1.0 on an average one, and for a prompt that
    has a home already (see `homes`).

    An engine that is idle now does not stay so: who comes while it computes waits for half of that
    on average, and an average engine has `mean_requests` of them.
    """
    o = occupancy
    rate = o.prefill_tokens_per_s
    output = traffic.output_tokens
    uncached = max(prompt_tokens - cached_tokens, 1)
    delayed = max(o.waiting + DECODE_WEIGHT * o.running, DECODE_WEIGHT * mean_requests / 2)
    step_growth_s = o.step_s_per_token * (prompt_tokens + output / 2)

    wait_s = o.queued_tokens / rate + o.step_s + _slot_wait_s(uncached, output, o)
    prefill_s = uncached / rate
    decode_s = DECODE_WEIGHT * output * (o.step_s + step_growth_s)
    slowed_s = DECODE_WEIGHT * output * step_growth_s * _running_together(o)
    harm_s = prefill_s * delayed + slowed_s
    new_tokens = PROMPT_STAY * uncached + output
    evict_s = _lost_tokens(new_tokens, o, traffic.reuse) / rate * (1.0 + delayed)
    later_s = 0.0
    if home_share != 1.0:
        # Each of the sequences that share an engine delays this one, and is delayed by it.
        per_sequence_s = DECODE_WEIGHT * (prefill_s + 2.0 * output * step_growth_s)
        more_sequences = (home_share - 1.0) * mean_requests
        later_s = LATER_USES * traffic.reuse * more_sequences * per_sequence_s
    return Cost(
        wait_s + prefill_s + decode_s + harm_s + evict_s + later_s,
        wait_s,
        prefill_s,
        decode_s,
        harm_s,
        evict_s,
        later_s,
    )


def _running_together(o: Occupancy) -> float:
    """Sequences that will share their steps with a further one."""
    others = o.running + o.waiting
    return min(others, o.max_running) if o.max_running else others


def _slot_wait_s(uncached: int, output: float, o: Occupancy) -> float:
    """Time until running sequences have made room, where seats or memory are short.

    Sequences end at the rate running ÷ (output × step); each that has to end before this one can
    run costs one such interval.
    """
    queue = o.waiting + 1.0
    short = o.running + queue - o.max_running if o.max_running else 0.0
    if o.total_tokens:
        needed = o.queued_tokens + uncached + queue * output
        missing = needed - o.free_tokens - o.evictable_tokens
        if missing > 0.0:
            short = max(short, queue * missing / needed)
    if short <= 0.0:
        return 0.0
    return min(short, queue) * output * o.step_s / max(o.running, 1.0)


def _lost_tokens(new_tokens: float, o: Occupancy, reuse: float) -> float:
    """Tokens of cached work that will have to be computed again because of the new ones.

    A new block displaces another one sooner or later, the more likely the fuller the engine is, and
    what it displaces would have been wanted again with the chance `reuse`. Blocks that nobody uses
    now are worth half of the mean: the least recently used ones go first.
    """
    if not o.total_tokens:
        return 0.0
    spare = o.free_tokens + (1.0 - reuse / 2) * o.evictable_tokens - new_tokens
    fill = 1.0 - spare / o.total_tokens if spare > 0.0 else 1.0
    return new_tokens * reuse * fill
