"""Chats that nobody has sent before, at a steady rate, each from a tenant of its own.

`python -m kvoy_cli.bench.soak.prompt_client PORT --rate R --words W` prints a line of JSON
(`Progress`) each second, and stops when its standard input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections.abc import Sequence

import msgspec

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.event_loop import run
from kvoy_cli.bench.request import Request, chat
from kvoy_cli.bench.workloads import sentence

SERVED_NAME = "bench"
_OUTPUT_TOKENS = 16
_SHORT_WORDS = 8
_REPORT_S = 1.0
_TENANT_HEADER = "x-llm-d-inference-fairness-id"


class Progress(msgspec.Struct, frozen=True):
    sent: int = 0
    answered: int = 0
    failed: int = 0
    failure: str = ""
    """What the first of them said."""


class PromptLoad:
    def __init__(self, client: Client, rate: float, num_words: int, seed: int = 0) -> None:
        self._client = client
        self._rate = rate
        self._num_words = num_words
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_sent = 0
        self._num_answered = 0
        self._num_failed = 0
        self._failure = ""

    @property
    def progress(self) -> Progress:
        return Progress(self._num_sent, self._num_answered, self._num_failed, self._failure)

    async def send_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s += self._random.expovariate(self._rate)
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            task = asyncio.ensure_future(self._send())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def drain(self, limit_s: float) -> None:
        """Wait for what is open; what takes longer is given up and counts as neither."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=limit_s)
            for task in late:
                task.cancel()

    async def _send(self) -> None:
        self._num_sent += 1
        outcome = await self._client.send(self._request())
        if outcome.is_ok:
            self._num_answered += 1
        else:
            self._num_failed += 1
            self._failure = self._failure or str(outcome.error)

    def _request(self) -> Request:
        """A chat with a past: its beginning is worth remembering, although nobody comes back."""
        parts = (self._num_words, _SHORT_WORDS, _SHORT_WORDS)
        messages = [
            {"role": role, "content": f"{self._num_sent}. {sentence(self._random, num_words)}"}
            for role, num_words in zip(("user", "assistant", "user"), parts, strict=True)
        ]
        request = chat(SERVED_NAME, messages, _OUTPUT_TOKENS)
        tenant = (_TENANT_HEADER, f"tenant-{self._num_sent}")
        return Request(request.path, request.body, headers=(tenant,))


async def _run(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    async with Client(f"127.0.0.1:{options.port}") as client:
        load = PromptLoad(client, options.rate, options.words)
        stopped = loop.create_task(asyncio.to_thread(sys.stdin.buffer.read))
        sending = loop.create_task(load.send_for_ever())
        while not stopped.done():
            await asyncio.wait([stopped, sending], timeout=_REPORT_S)
            _say(load)
            if sending.done():
                sending.result()
        sending.cancel()
        await load.drain(5.0)
        _say(load)


def _say(load: PromptLoad) -> None:
    print(msgspec.json.encode(load.progress).decode(), flush=True)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prompt_client")
    parser.add_argument("port", type=int)
    parser.add_argument("--rate", type=float, default=15.0)
    parser.add_argument("--words", type=int, default=1100)
    return parser.parse_args(argv)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        run(_run(_parse(sys.argv[1:])))
