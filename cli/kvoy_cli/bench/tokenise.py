"""`kvoy bench tokenise`: what turning a long chat into token ids costs, and whom it delays.

In this process: a chat of 100,000 tokens that nobody has seen, beside the `tokenizers` library's
own encoding of the same text, in turn; and the next turn of that chat. Through a router: short
requests, undisturbed and while such chats arrive from another process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE

import msgspec

from kvoy_cli.bench import cold_client
from kvoy_cli.bench.client import Client
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.fake_answers import MODEL
from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.load import run_open_loop
from kvoy_cli.bench.outcome import Outcome
from kvoy_cli.bench.processes import BenchError, child
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.request import chat
from kvoy_cli.bench.router_cost import fake_engines
from kvoy_cli.bench.schedule import poisson_offsets
from kvoy_cli.bench.stack import router
from kvoy_cli.bench.stats import Spread, median, paired_ratios, percentile
from kvoy_cli.bench.workloads import long_chat
from kvoy_contract.openai import ChatCompletionRequest, Message
from kvoy_contract.prompt import PromptEncoder, TokenizerFiles, byte_tokenizer_files

_COLD_GOAL = 1.1
_DELAY_GOAL = 1.2
_NEW_PIECES = 2
"""A turn adds an answer and a message."""
_READY_S = 60.0
_SHORT = [{"role": "user", "content": "What is the tallest mountain of Europe, and how high?"}]


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_words: int = 91_000
    """About 100,000 tokens of the usual tokenizers."""
    seconds: float = 5.0
    rate: float = 200.0
    cold_every_s: float = 1.0


@dataclass(frozen=True, slots=True)
class _Encodings:
    """Seconds, repeat by repeat."""

    cold_s: list[float]
    library_s: list[float]
    next_turn_s: list[float]
    new_pieces: list[int]
    """That the next turn had to be encoded anew."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Delays:
    """p99 of short requests in milliseconds, repeat by repeat."""

    undisturbed_ms: list[float]
    disturbed_ms: list[float]


async def run(context: BenchContext) -> Report:
    sizes = _Sizes(2_000, 0.5, 50.0, 0.2) if context.is_smoke else _Sizes()
    folder = None if context.is_smoke else context.model_folder()
    encodings = _encode(context, sizes, folder)
    delays = await _delay(context, sizes, folder)
    return build_report(sizes, encodings, delays)


def _as_request(messages: list[dict[str, str]]) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        model=MODEL, messages=[Message(role=m["role"], content=m["content"]) for m in messages]
    )


def _encode(context: BenchContext, sizes: _Sizes, folder: Path | None) -> _Encodings:
    files = TokenizerFiles.from_folder(folder) if folder else byte_tokenizer_files()
    encoder = PromptEncoder(files)
    found = _Encodings([], [], [], [], 0)
    num_tokens = 0
    # Both have made what they make once.
    encoder.codec.encode_whole("Hello.")
    encoder.encode_chat(_as_request(_SHORT))
    for repeat in range(context.repeats):
        context.say(f"encoding, repeat {repeat + 1} of {context.repeats}")
        messages = long_chat(sizes.num_words, repeat)
        request = _as_request(messages)
        text = encoder.render_chat(request)
        found.library_s.append(_seconds(partial(encoder.codec.encode_whole, text)))
        found.cold_s.append(_seconds(partial(encoder.encode_chat_array, request)))
        more = [
            *messages,
            {"role": "assistant", "content": f"An answer of repeat {repeat}, as answers are."},
            {"role": "user", "content": f"And then, in repeat {repeat}?"},
        ]
        before = encoder.cache.num_misses
        turn = _as_request(more)
        found.next_turn_s.append(_seconds(partial(encoder.encode_chat_array, turn)))
        found.new_pieces.append(encoder.cache.num_misses - before)
        num_tokens = len(encoder.encode_chat_array(turn).ids)
    return _Encodings(
        found.cold_s, found.library_s, found.next_turn_s, found.new_pieces, num_tokens
    )


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


async def _delay(context: BenchContext, sizes: _Sizes, folder: Path | None) -> _Delays:
    tokenizer = () if folder is None else ("--tokenizer", str(folder))
    found = _Delays([], [])
    async with AsyncExitStack() as stack:
        entries = await stack.enter_async_context(fake_engines(context, *tokenizer))
        front = await stack.enter_async_context(router(entries, "kv-aware", context))
        client = await stack.enter_async_context(Client(front.url))
        for repeat in range(context.repeats):
            context.say(f"short requests beside cold prompts, repeat {repeat + 1}")
            found.undisturbed_ms.append(await _p99_ms(client, sizes, repeat))
            async with _cold_chats(context, sizes, front.port, 1000 * (repeat + 1)):
                found.disturbed_ms.append(await _p99_ms(client, sizes, repeat))
    return found


@asynccontextmanager
async def _cold_chats(
    context: BenchContext, sizes: _Sizes, port: int, seed: int
) -> AsyncIterator[None]:
    """Such chats arrive from the block's beginning on, and all have been answered at its end."""
    options = {
        "words": sizes.num_words,
        "count": int(sizes.seconds / sizes.cold_every_s),
        "pause": sizes.cold_every_s / 2,
        "seed": seed,
    }
    command = [sys.executable, "-m", cold_client.__name__, str(port)]
    command += [f"--{name}={value}" for name, value in options.items()]
    name = f"cold-client-{seed}"
    async with child(name, command, context.logs, stdin=PIPE, stdout=PIPE) as sender:
        stdin, stdout = sender.process.stdin, sender.process.stdout
        assert stdin is not None
        assert stdout is not None
        async with asyncio.timeout(_READY_S):
            if not await asyncio.to_thread(stdout.readline):
                raise sender.failure("ended before it was ready")
        stdin.write(b"begin\n")
        stdin.flush()
        yield
        line = await asyncio.to_thread(stdout.readline)
        if not line:
            raise sender.failure("ended before its chats were answered")
    sent = msgspec.json.decode(line, type=cold_client.Sent)
    if sent.failure:
        raise BenchError(f"cold chat {sent.answered + 1} failed: {sent.failure}")


async def _p99_ms(client: Client, sizes: _Sizes, repeat: int) -> float:
    request = chat(MODEL, _SHORT, 1, stream=False)
    offsets = poisson_offsets(sizes.rate, sizes.seconds, seed=repeat)
    load = await run_open_loop(
        client, iter([request] * len(offsets)), offsets, sizes.seconds, drain_s=2.0
    )
    _check([outcome for outcome in load.outcomes if not outcome.is_cut])
    times_ms = [1000 * (o.end_s - o.sent_s) for o in load.outcomes if o.is_ok]
    return percentile(times_ms, 99)


def _check(outcomes: list[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if not outcome.is_ok]
    if failed:
        raise BenchError(f"{len(failed)} of {len(outcomes)} failed: {failed[0].error}")


def build_report(sizes: _Sizes, encodings: _Encodings, delays: _Delays) -> Report:
    cold = paired_ratios(encodings.cold_s, encodings.library_s)
    delay = paired_ratios(delays.disturbed_ms, delays.undisturbed_ms)
    rows = (
        ("tokenizers' own", Spread.of([1000 * s for s in encodings.library_s]).text()),
        ("cold chat", Spread.of([1000 * s for s in encodings.cold_s]).text()),
        ("its next turn", Spread.of([1000 * s for s in encodings.next_turn_s]).text()),
    )
    short = (
        ("undisturbed", Spread.of(delays.undisturbed_ms).text()),
        ("beside cold prompts", Spread.of(delays.disturbed_ms).text()),
    )
    return Report(
        name="tokenise",
        setting=f"a chat of {encodings.num_tokens:,} tokens, {len(cold)} repeats; short requests "
        f"at {sizes.rate:g}/s for {sizes.seconds:g} s through a router, a cold chat about every "
        f"{sizes.cold_every_s:g} s",
        tables=(
            Table("Encoding, ms: median (least–greatest)", ("what", "ms"), rows),
            Table("Short requests, p99 ms: median (least–greatest)", ("when", "ms"), short),
        ),
        goals=(
            Goal("pieces that a next turn encodes", max(encodings.new_pieces), "<=", _NEW_PIECES),
            Goal("cold chat ÷ tokenizers' own encode", median(cold), "<=", _COLD_GOAL, " ×"),
            Goal(
                "p99 of short requests beside cold chats ÷ undisturbed",
                median(delay),
                "<=",
                _DELAY_GOAL,
                " ×",
            ),
        ),
        figures={
            "cold_ratio": median(cold),
            "next_turn_ms": 1000 * median(encodings.next_turn_s),
            "delay_ratio": median(delay),
        },
    )
