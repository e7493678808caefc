"""Long chats that nobody has sent before, one after the other, from a process of their own: what
sending one takes is not to delay another client.

`python -m kvoy_cli.bench.cold_client PORT --words W --count N --pause S --seed I` prints a line
when it has made its chats, begins when a line comes on its standard input, and prints a line of
JSON (`Sent`) at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence

import msgspec

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.event_loop import run
from kvoy_cli.bench.fake_answers import MODEL
from kvoy_cli.bench.request import Request, chat
from kvoy_cli.bench.workloads import long_chat


class Sent(msgspec.Struct, frozen=True):
    answered: int = 0
    failure: str = ""
    """What the first one said that was not answered."""


async def send_all(client: Client, requests: Sequence[Request], pause_s: float) -> Sent:
    """One at a time, `pause_s` after the answer of the one before."""
    num_answered = 0
    for request in requests:
        outcome = await client.send(request)
        if not outcome.is_ok:
            return Sent(num_answered, str(outcome.error))
        num_answered += 1
        await asyncio.sleep(pause_s)
    return Sent(num_answered)


async def _serve(options: argparse.Namespace) -> None:
    requests = [
        chat(MODEL, long_chat(options.words, options.seed + index), 1, stream=False)
        for index in range(options.count)
    ]
    print("ready", flush=True)
    if not await asyncio.to_thread(sys.stdin.readline):
        return
    async with Client(f"127.0.0.1:{options.port}") as client:
        sent = await send_all(client, requests, options.pause)
    print(msgspec.json.encode(sent).decode(), flush=True)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cold_client")
    parser.add_argument("port", type=int)
    parser.add_argument("--words", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        run(_serve(_parse(sys.argv[1:])))
