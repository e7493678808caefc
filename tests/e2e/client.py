"""A user of the endpoint, run inside a pod: one chat, or load for as long as it is wanted.

    client.py wait                                       stays until it is told to end
    client.py chat BASE_URL MODEL TEXT...                a conversation, one user turn per TEXT
    client.py load BASE_URL MODEL CONCURRENCY STOP_FILE  streams, one after the other, per user,
                                                         until the file exists

Prints one JSON document. It needs the `openai` package and nothing else, and never retries: a
request that fails is a request that failed.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

NO_RETRIES = 0
TIMEOUT_S = 120.0
MAX_LOAD_S = 900.0


async def chat(base_url: str, model: str, turns: list[str]) -> dict[str, Any]:
    """The answers, and how many prompt tokens of each turn came from a cache."""
    from openai import AsyncOpenAI

    messages: list[Any] = []
    answers: list[dict[str, Any]] = []
    async with AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=NO_RETRIES, timeout=TIMEOUT_S
    ) as client:
        models = [entry.id async for entry in client.models.list()]
        for text in turns:
            messages.append({"role": "user", "content": text})
            completion = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=32, temperature=0.0
            )
            content = completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": content})
            usage = completion.usage
            assert usage is not None
            details = usage.prompt_tokens_details
            answers.append(
                {
                    "text": content,
                    "prompt_tokens": usage.prompt_tokens,
                    "cached_tokens": (details.cached_tokens or 0) if details else 0,
                }
            )
    return {"models": models, "answers": answers}


async def load(base_url: str, model: str, concurrency: int, stop_file: Path) -> dict[str, Any]:
    """Streams of every user until the file exists, and what became of them."""
    from openai import AsyncOpenAI

    deadline = time.monotonic() + MAX_LOAD_S
    failures: list[str] = []
    counts = {"completed": 0, "chunks": 0}

    async def user(number: int, client: AsyncOpenAI) -> None:
        turn = 0
        while time.monotonic() < deadline and not stop_file.exists():
            turn += 1
            try:
                stream = await client.completions.create(
                    model=model,
                    prompt=f"User {number} asks, for the {turn}th time: " + "tell me more. " * 20,
                    max_tokens=24,
                    stream=True,
                )
                reason = None
                async for chunk in stream:
                    counts["chunks"] += 1
                    if chunk.choices and chunk.choices[0].finish_reason:
                        reason = chunk.choices[0].finish_reason
                if reason is None:
                    failures.append(f"user {number} turn {turn}: the stream ended without a reason")
                else:
                    counts["completed"] += 1
            except Exception as error:
                failures.append(f"user {number} turn {turn}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.2)

    async with AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=NO_RETRIES, timeout=TIMEOUT_S
    ) as client:
        await asyncio.gather(*(user(number, client) for number in range(concurrency)))
    return {**counts, "failures": failures}


def wait() -> None:
    """Until SIGTERM; the first process of a container gets it only if it asks for it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()


def main(argv: list[str]) -> None:
    match argv:
        case ["wait"]:
            wait()
        case ["chat", base_url, model, *turns]:
            print(json.dumps(asyncio.run(chat(base_url, model, turns))))
        case ["load", base_url, model, concurrency, stop_file]:
            report = asyncio.run(load(base_url, model, int(concurrency), Path(stop_file)))
            print(json.dumps(report))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
