"""What each route costs on stand-in engines: CPU per streamed chunk and per request, time added,
requests a second, memory. All routes in turn within each repeat, so that a slow minute of the
machine hits all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.load import run_closed_loop
from kvoy_cli.bench.request import Request, chat
from kvoy_cli.bench.stack import settle
from kvoy_cli.bench.stats import median
from kvoy_peers.figures import (
    RequestCost,
    RouteCosts,
    StreamCost,
    TurnCost,
    request_cost,
    stream_cost,
)
from kvoy_peers.routes import Route
from kvoy_peers.traffic import Conversation

_QUESTION = [{"role": "user", "content": "What is the tallest mountain of Europe, and how high?"}]
_ANSWER_TOKENS = 8
_STREAM_LIMIT_S = 10.0
_CLEAR_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class CostSizes:
    num_streams: int = 32
    chunks_per_stream: int = 1000
    gap_s: float = 0.004
    """Between two events of a stream: long enough that each is read by itself."""
    concurrencies: tuple[int, ...] = (1, 32, 256)
    seconds: float = 1.5
    """Of each closed loop."""
    histories: tuple[int, ...] = (32, 8_000, 100_000)
    """Tokens of the conversations whose next turn is asked."""
    turn_users: int = 32
    settle_s: float = 0.3
    """Between two measurements, and of the first requests of a route, which are not measured."""


class CostRun:
    """Measures routes; `patience` of a route makes its loops so many times as long."""

    def __init__(
        self,
        context: BenchContext,
        sizes: CostSizes,
        model: str,
        conversations: Callable[[int, int], Sequence[Conversation]],
        patience: Callable[[str], int],
    ) -> None:
        """`conversations(tokens, count)` makes so many different histories of so many tokens."""
        self._context = context
        self._sizes = sizes
        self._model = model
        self._patience = patience
        self._histories = {
            tokens: conversations(tokens, sizes.turn_users) for tokens in sizes.histories
        }

    async def measure(self, routes: Sequence[Route]) -> dict[str, RouteCosts]:
        costs = {route.name: RouteCosts() for route in routes}
        for route in routes:
            await self._closed_loop(route, repeat(self._question()), 32, self._sizes.settle_s)
        for number in range(self._context.repeats):
            for route in routes:
                text = f"cost, repeat {number + 1} of {self._context.repeats}: {route.name}"
                self._context.say(text)
                await self._measure_one(route, costs[route.name], number)
        return costs

    async def _measure_one(self, route: Route, costs: RouteCosts, number: int) -> None:
        sizes = self._sizes
        costs.streams.append(await self._streams(route))
        for concurrency in sizes.concurrencies:
            cost = await self._closed_loop(
                route, repeat(self._question()), concurrency, sizes.seconds
            )
            costs.requests.setdefault(concurrency, []).append(cost)
        for tokens in sizes.histories:
            cost_of_turn = await self._turns(route, tokens, number)
            costs.turns.setdefault(tokens, []).append(cost_of_turn)
        costs.resident_mb.append(route.resident_bytes() / 1e6)

    async def _streams(self, route: Route) -> StreamCost:
        sizes = self._sizes
        request = chat(self._model, _QUESTION, sizes.chunks_per_stream)
        before_s = route.cpu_s()
        load = await run_closed_loop(
            route.client,
            iter([request] * sizes.num_streams),
            sizes.num_streams,
            _STREAM_LIMIT_S,
        )
        cpu_s = route.cpu_s() - before_s
        # Who is cut off may have streams to clear away: what is measured next begins after that.
        await run_closed_loop(route.client, iter([self._question()]), 1, _CLEAR_LIMIT_S)
        await settle(self._sizes.settle_s)
        return stream_cost(load.outcomes, cpu_s)

    async def _turns(self, route: Route, tokens: int, number: int) -> TurnCost:
        """The histories are told first, so that what follows are next turns for everybody."""
        conversations = self._histories[tokens]
        told = [c.next_turn(self._model, f"first of repeat {number}") for c in conversations]
        load = await run_closed_loop(route.client, iter(told), 4)
        counts = [o.prompt_tokens for o in load.outcomes if o.is_ok]
        await settle(self._sizes.settle_s)
        alone = await self._closed_loop(
            route, _next_turns(conversations[:1], self._model, number), 1, self._sizes.seconds
        )
        together = await self._closed_loop(
            route,
            _next_turns(conversations, self._model, number),
            self._sizes.turn_users,
            self._sizes.seconds,
        )
        return TurnCost(alone, together, median(counts))

    async def _closed_loop(
        self, route: Route, requests: Iterator[Request], num_users: int, seconds: float
    ) -> RequestCost:
        seconds *= self._patience(route.name)
        before_s = route.cpu_s()
        load = await run_closed_loop(route.client, requests, num_users, seconds)
        cpu_s = route.cpu_s() - before_s
        await settle(self._sizes.settle_s)
        return request_cost(load.outcomes, load.end_s - load.start_s, cpu_s)

    def _question(self) -> Request:
        return chat(self._model, _QUESTION, _ANSWER_TOKENS, stream=False)


def _next_turns(
    conversations: Sequence[Conversation], model: str, number: int
) -> Iterator[Request]:
    """Every one differs in its last message alone from what was told before."""
    index = 0
    while True:
        for conversation in conversations:
            index += 1
            yield conversation.next_turn(model, f"And what about number {index} of {number}?")
