"""The engines of a large fleet in the order in which a policy looks at them, kept up to date change
by change, so that a pick looks at a few of them and not at all.

A cost depends on the request, so no order is right for every request. What is weighed exactly is a
shortlist: the engines that hold most of this prompt, the best ones by the cost of a short and of a
long prompt that nobody holds, and a few drawn at random. The random ones bound what a wrong order
can cost: of d engines drawn at random the better one is nearly as good as the best of all
(Mitzenmacher, "The power of two choices in randomized load balancing", 2001). Equal engines stand
in random order, so that several routers do not all look at the same ones.

It has no clock and does no I/O; the pool tells it what has changed, and one thread owns it."""

from __future__ import annotations

import enum
import sys
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TypeVar

from kvoy_router import filters
from kvoy_router.cost import Traffic, estimate
from kvoy_router.endpoint import Endpoint
from kvoy_router.occupancy import Occupancy, average_of, measured
from kvoy_router.prefix_index import Groups, slots_of
from kvoy_router.request import InferenceRequest

MAX_HOLDERS = 24
"""Weighed at most because they hold some of the prompt, the deepest ones first."""
MAX_PER_DEPTH = 8
"""Of those that hold equally much the cheapest ones: the others hold no more and cost more."""
NUM_BEST = 16
"""Weighed because they are the first in an order; where there are two orders, half of each."""
SHORT, LONG = 0.25, 4.0
"""The prompts that engines are ordered for, in average prompts of the model: to a short one it
matters how fast an engine decodes, to a long one how fast it reads and what would be evicted."""
NUM_RANDOM = 4
NUM_UNKNOWN = 4
"""Engines without a report of their own that are weighed, as average ones."""
ORDER_NOISE = 0.02
"""Costs that differ by less than measurements do stand in random order."""
AVERAGE_AGE_S = 0.25
"""What an average engine is like is counted anew so often, and only when it is asked."""

K = TypeVar("K")
_is_serving = filters.is_serving(frozenset())
_Entry = tuple[float, int, Endpoint]
"""The number is unique: endpoints have no order of their own."""


class Order(enum.Enum):
    """By what a policy looks at engines first."""

    COST = "cost"
    LOAD = "load"
    TURN = "turn"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class _Standing:
    entries: Sequence[_Entry]
    """One for each order."""
    occupancy: Occupancy | None
    """None: it has no usable report of its own."""
    is_fresh: bool
    limit: int
    """Tokens of prompt and output that it can hold."""
    service: str


class Standings:
    """Of one model's engines. Everything in it is derived from the endpoints themselves."""

    def __init__(self, order: Order, random: Random, stale_after_s: float) -> None:
        self._order = order
        self._random = random
        self._stale_after_s = stale_after_s
        self.members: dict[Endpoint, None] = {}
        """All engines of the model; whoever adds one has it updated."""
        self._standings: dict[Endpoint, _Standing] = {}
        """Of those that may serve at all."""
        self._by_slot: dict[int, Endpoint] = {}
        self._slots: dict[Endpoint, int] = {}
        num_orders = 2 if order is Order.COST else 1
        self._orders: Sequence[list[_Entry]] = [[] for _ in range(num_orders)]
        """The known ones, in order."""
        self._unknown: dict[Endpoint, None] = {}
        """Fresh, but without a report of their own."""
        self._silent: dict[Endpoint, None] = {}
        """Lost and stale ones: looked at while there are no others."""
        self._loads: list[float] = []
        """Requests at each ranked engine, in order."""
        self._total_load = 0.0
        self._heard: OrderedDict[Endpoint, float] = OrderedDict()
        """When each ranked one reported last, the oldest first."""
        self._limits: Counter[int] = Counter()
        self._services: Counter[str] = Counter()
        """Of the fresh ones."""
        self._num_entries = 0
        self._average: Occupancy | None = None
        self._average_s = 0.0

    @property
    def services(self) -> Iterable[str]:
        """With an engine that can be chosen now."""
        return self._services.keys()

    def mean_requests(self) -> float:
        """Requests at an engine, the busiest one left out."""
        count = len(self._loads)
        return (self._total_load - self._loads[-1]) / (count - 1) if count > 1 else 0.0

    def average(self, now_s: float) -> Occupancy:
        """An average engine of those that are known."""
        if self._average is None or now_s - self._average_s >= AVERAGE_AGE_S:
            known = [s.occupancy for s in self._standings.values() if s.occupancy is not None]
            self._average = average_of(known)
            self._average_s = now_s
        return self._average

    # Changes

    def update(
        self, endpoint: Endpoint, now_s: float, prompt_tokens: int, traffic: Traffic
    ) -> None:
        """Something about it may have changed. The average prompt of this model has
        `prompt_tokens`."""
        self._remove(endpoint)
        if endpoint not in self.members or _is_serving(endpoint) is not None:
            return
        is_known = endpoint.is_known(now_s, self._stale_after_s)
        occupancy = measured(endpoint) if is_known else None
        self._num_entries += 1
        keys = self._keys(endpoint, occupancy, prompt_tokens, traffic)
        standing = _Standing(
            entries=[(key, self._num_entries, endpoint) for key in keys],
            occupancy=occupancy,
            is_fresh=endpoint.is_fresh(now_s, self._stale_after_s),
            limit=_limit(endpoint),
            service=endpoint.origin.service,
        )
        self._standings[endpoint] = standing
        self._by_slot[endpoint.slot] = endpoint
        self._slots[endpoint] = endpoint.slot
        self._limits[standing.limit] += 1
        if not standing.is_fresh:
            self._silent[endpoint] = None
            return
        self._services[standing.service] += 1
        if occupancy is None:
            self._unknown[endpoint] = None
        else:
            for order, entry in zip(self._orders, standing.entries, strict=True):
                insort(order, entry)
            insort(self._loads, occupancy.num_requests)
            self._total_load += occupancy.num_requests
        if endpoint.load is not None and self._heard.get(endpoint) != endpoint.load_s:
            self._heard[endpoint] = endpoint.load_s
            self._heard.move_to_end(endpoint)

    def leave(self, endpoint: Endpoint) -> None:
        """It is no longer of this model."""
        self.members.pop(endpoint, None)
        self._remove(endpoint)

    def _remove(self, endpoint: Endpoint) -> None:
        standing = self._standings.pop(endpoint, None)
        if standing is None:
            return
        slot = self._slots.pop(endpoint)
        if self._by_slot.get(slot) is endpoint:  # else the slot is another one's by now
            del self._by_slot[slot]
        _count_down(self._limits, standing.limit)
        if not standing.is_fresh:
            del self._silent[endpoint]
            return
        _count_down(self._services, standing.service)
        if standing.occupancy is None:
            del self._unknown[endpoint]
            return
        for order, entry in zip(self._orders, standing.entries, strict=True):
            del order[bisect_left(order, entry)]
        num_requests = standing.occupancy.num_requests
        del self._loads[bisect_left(self._loads, num_requests)]
        self._total_load -= num_requests

    def gone_silent(self, now_s: float) -> Sequence[Endpoint]:
        """Those whose last report has become too old since this was asked last: to be updated."""
        silent = []
        while self._heard:
            endpoint, heard_s = next(iter(self._heard.items()))
            if now_s - heard_s <= self._stale_after_s:
                break
            del self._heard[endpoint]
            if endpoint in self._standings:
                silent.append(endpoint)
        return silent

    def _keys(
        self,
        endpoint: Endpoint,
        occupancy: Occupancy | None,
        prompt_tokens: int,
        traffic: Traffic,
    ) -> Sequence[float]:
        """Its place in each order. Of engines that are alike the noise decides, anew each time."""
        if self._order is Order.TURN:
            return [endpoint.last_pick]
        if occupancy is None or self._order is Order.ANY:
            return [0.0] * len(self._orders)
        if self._order is Order.LOAD:
            return [occupancy.num_requests + 0.5 * self._random.random()]
        noise = 1.0 + ORDER_NOISE * self._random.random()
        mean_requests = self.mean_requests()
        return [
            noise
            * estimate(int(size * prompt_tokens), 0, occupancy, traffic, mean_requests).total_s
            for size in (SHORT, LONG)
        ]

    # The shortlist

    def shortlist(
        self,
        request: InferenceRequest,
        groups: Groups,
        exclude: frozenset[str],
        service: str | None = None,
    ) -> Sequence[Endpoint]:
        """The engines to weigh for this request; empty where only a look at all of them can tell.

        `groups` says who holds how much of the prompt, and `service` whose engines count.
        """
        wanted = self._wanted(request, exclude, service)
        found: dict[Endpoint, None] = {}
        if self._order is Order.COST:
            self._add_holders(found, groups, wanted)
            found.update(dict.fromkeys(self._some(NUM_RANDOM, wanted)))
        if self._order is Order.ANY:
            found.update(dict.fromkeys(self._some(1, wanted)))
        else:
            for order in self._orders:
                first = wanted.first(order, NUM_BEST // len(self._orders))
                found.update(dict.fromkeys(first))
        if self._unknown:
            found.update(dict.fromkeys(self._drawn(self._unknown, NUM_UNKNOWN, wanted)))
        if not found and self._silent:
            found.update(dict.fromkeys(self._drawn(self._silent, NUM_BEST, wanted)))
        return list(found)

    def _wanted(
        self, request: InferenceRequest, exclude: frozenset[str], service: str | None
    ) -> _Wanted:
        """As `filters` do: the prompt must fit, all of the output if that fits anywhere."""
        need = request.num_prompt_tokens + max(request.max_tokens or 1, 1)
        if need > max(self._limits, default=0):
            need = request.num_prompt_tokens + 1
        is_limit = need > min(self._limits, default=0)
        return _Wanted(need if is_limit else 0, exclude, service, self._standings)

    def _add_holders(self, found: dict[Endpoint, None], groups: Groups, wanted: _Wanted) -> None:
        for _, bits in groups:
            room = min(MAX_PER_DEPTH, MAX_HOLDERS - len(found))
            if room <= 0:
                break
            if bits.bit_count() > room:
                found.update(dict.fromkeys(wanted.first(self._orders[0], room, bits)))
                continue
            for slot in slots_of(bits):
                endpoint = self._by_slot.get(slot)
                if endpoint is not None and wanted.has(endpoint):
                    standing = self._standings[endpoint]
                    if standing.occupancy is not None and standing.is_fresh:
                        found[endpoint] = None

    def _some(self, count: int, wanted: _Wanted) -> Iterable[Endpoint]:
        """Of the ranked ones, at random. Where few are wanted, the next wanted one each time."""
        ranked = self._orders[0]
        for _ in range(count if ranked else 0):
            start = self._random.randrange(len(ranked))
            for position in range(start, start + len(ranked)):
                endpoint = ranked[position % len(ranked)][2]
                if wanted.has(endpoint):
                    yield endpoint
                    break
            else:
                return

    def _drawn(
        self, among: dict[Endpoint, None], count: int, wanted: _Wanted
    ) -> Iterable[Endpoint]:
        """In random order; as many as are wanted, of all of them if need be."""
        drawn = list(among)
        self._random.shuffle(drawn)
        return islice(filter(wanted.has, drawn), count)

    def check_integrity(self) -> None:
        known = [e for e, s in self._standings.items() if s.is_fresh and s.occupancy is not None]
        for number, order in enumerate(self._orders):
            assert order == sorted(self._standings[e].entries[number] for e in known)
        loads = sorted(o.num_requests for e in known if (o := self._standings[e].occupancy))
        assert self._loads == loads
        assert abs(self._total_load - sum(loads)) < 1e-6
        assert len(known) + len(self._unknown) + len(self._silent) == len(self._standings)
        assert self._limits.total() == len(self._standings)
        assert self._services.total() == len(known) + len(self._unknown)
        assert all(self._slots[endpoint] == slot for slot, endpoint in self._by_slot.items())


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which engines one request may have, of those that may serve at all."""

    limit: int
    """0: all of them are large enough."""
    exclude: frozenset[str]
    service: str | None
    standings: dict[Endpoint, _Standing]

    def has(self, endpoint: Endpoint) -> bool:
        if endpoint.id in self.exclude:
            return False
        standing = self.standings[endpoint]
        return standing.limit >= self.limit and self.service in (None, standing.service)

    def first(self, ranked: Sequence[_Entry], count: int, bits: int = -1) -> Sequence[Endpoint]:
        """The first so many of those whose slots are set in `bits`."""
        is_free = not self.limit and not self.exclude and self.service is None
        if is_free and bits == -1:
            return [endpoint for _, _, endpoint in ranked[:count]]
        found = []
        for _, _, endpoint in ranked:
            if bits >> endpoint.slot & 1 and (is_free or self.has(endpoint)):
                found.append(endpoint)
                if len(found) == count:
                    break
        return found


def _limit(endpoint: Endpoint) -> int:
    info = endpoint.info
    limits = [sys.maxsize]
    if info is not None and info.max_model_len:
        limits.append(info.max_model_len)
    if info is not None and info.num_blocks:
        limits.append(info.num_blocks * info.block_size)
    return min(limits)


def _count_down(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
