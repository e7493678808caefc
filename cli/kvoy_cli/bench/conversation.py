"""`kvoy bench conversation`: a chat whose history grows, through a router over two engines.

With kv-aware routing every turn should cost what its new words cost. Round-robin beside it, on
the same engines, shows what the router is worth. Chats share no prefix, so no run profits from
another.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.outcome import Outcome
from kvoy_cli.bench.processes import BenchError
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.request import chat
from kvoy_cli.bench.stack import engines, router, torch_engine
from kvoy_cli.bench.stats import Spread, median, ratio
from kvoy_cli.bench.workloads import chat_script

_POLICIES = ("kv-aware", "round-robin")
_NUM_ENGINES = 2
_BLOCK_SIZE = 16
_EARLY_TURN = 2


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_turns: int = 10
    words_per_turn: int = 60
    answer_tokens: int = 48


async def run(context: BenchContext) -> Report:
    sizes = (
        _Sizes(num_turns=3, words_per_turn=12, answer_tokens=4) if context.is_smoke else _Sizes()
    )
    spec = torch_engine(context.model_folder(), _NUM_ENGINES)
    chats: dict[str, list[list[Outcome]]] = {policy: [] for policy in _POLICIES}
    async with AsyncExitStack() as stack:
        context.say(f"starting {_NUM_ENGINES} engines and a router for each policy")
        fleet = await stack.enter_async_context(engines([spec] * _NUM_ENGINES, context))
        clients: dict[str, Client] = {}
        for policy in _POLICIES:
            entries = [engine.router_entry for engine in fleet]
            started = await stack.enter_async_context(router(entries, policy, context))
            clients[policy] = await stack.enter_async_context(Client(started.url))
        seed = 1000
        for policy in _POLICIES:  # warm both paths and both engines up; not counted
            await _run_chat(clients[policy], _Sizes(2, 12, 4), seed, context.served_name)
            seed += 1
        for repeat in range(context.repeats):
            for policy in _POLICIES:
                context.say(f"chat {repeat + 1} of {context.repeats}, {policy}")
                outcomes = await _run_chat(clients[policy], sizes, seed, context.served_name)
                chats[policy].append(outcomes)
                seed += 1
    return build_report(chats, sizes.num_turns, spec.num_threads or 0)


async def _run_chat(client: Client, sizes: _Sizes, seed: int, model: str) -> list[Outcome]:
    """One chat, turn after turn; every answer becomes part of the next prompt."""
    script = chat_script(sizes.num_turns, sizes.words_per_turn, seed)
    messages = [{"role": "system", "content": script.system}]
    outcomes: list[Outcome] = []
    for turn in script.turns:
        messages.append({"role": "user", "content": turn})
        outcome = await client.send(chat(model, messages, sizes.answer_tokens))
        if not outcome.is_ok:
            raise BenchError(f"turn {len(outcomes) + 1} failed: {outcome.error}")
        messages.append({"role": "assistant", "content": outcome.text})
        outcomes.append(outcome)
    return outcomes


def served_share(outcomes: list[Outcome]) -> float:
    """Share of the full blocks of earlier turns (prompt and answer) that came from the cache.

    The last token of an answer is never computed, so a turn leaves prompt + answer - 1 tokens
    behind.
    """
    cached = held = 0
    for before, now in pairwise(outcomes):
        left = before.prompt_tokens + before.completion_tokens - 1
        held += left // _BLOCK_SIZE
        cached += min(now.cached_tokens // _BLOCK_SIZE, left // _BLOCK_SIZE)
    return ratio(cached, held)


def build_report(chats: dict[str, list[list[Outcome]]], num_turns: int, num_threads: int) -> Report:
    growth = {
        policy: [ratio(c[num_turns - 1].ttft_s, c[_EARLY_TURN - 1].ttft_s) for c in runs]
        for policy, runs in chats.items()
    }
    shares = {policy: [served_share(c) for c in runs] for policy, runs in chats.items()}
    per_turn = Table(
        "By turn (medians)",
        (
            "turn",
            "prompt tokens",
            *(f"TTFT ms, {p}" for p in chats),
            *(f"cached, {p}" for p in chats),
        ),
        tuple(
            (
                turn + 1,
                median(c[turn].prompt_tokens for c in chats["kv-aware"]),
                *(1000 * median(c[turn].ttft_s for c in runs) for runs in chats.values()),
                *(median(c[turn].cached_tokens for c in runs) for runs in chats.values()),
            )
            for turn in range(num_turns)
        ),
    )
    summary = Table(
        "By policy: median (least–greatest)",
        (
            "policy",
            f"TTFT turn {num_turns} ÷ turn {_EARLY_TURN}",
            "full blocks of earlier turns from cache",
        ),
        tuple(
            (policy, Spread.of(growth[policy]).text(), Spread.of(shares[policy]).text(3))
            for policy in chats
        ),
    )
    return Report(
        name="conversation",
        setting=f"{len(chats['kv-aware'])} chats of {num_turns} turns per policy, one user, "
        f"{_NUM_ENGINES} engines of {num_threads} thread(s), one router per policy, interleaved",
        tables=(per_turn, summary),
        goals=(
            Goal(
                f"TTFT of turn {num_turns} ÷ TTFT of turn {_EARLY_TURN}, kv-aware",
                median(growth["kv-aware"]),
                "<=",
                1.5,
                " ×",
            ),
            Goal(
                "full blocks of earlier turns served from cache, kv-aware",
                median(shares["kv-aware"]),
                ">=",
                0.95,
            ),
        ),
        figures={
            f"{kind}_{policy}": median(values[policy])
            for kind, values in (("ttft_growth", growth), ("cached_share", shares))
            for policy in chats
        },
    )
