"""The bounds of what is made of a request are bounds: seen by what Python allocates."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable

import pytest

from kvoy_contract.openai import parse_chat, parse_completion
from kvoy_contract.prompt import PromptEncoder, byte_tokenizer_files
from kvoy_router.access import with_client
from kvoy_router.body_cost import decoding_bytes, encoding_bytes
from kvoy_router.prompts import Hashing, encode

WORDS = "The router sends each request to the engine that holds its work. "


def chat(*texts: str, ensure_ascii: bool = False) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages}, ensure_ascii=ensure_ascii).encode()


def completion(ids: str) -> bytes:
    return b'{"model":"m","prompt":[%b]}' % ids.encode()


def text_of(size: int) -> str:
    return WORDS * (size // len(WORDS))


Shape = Callable[[int], bytes]
"""A body of about so many bytes."""
DECODED, ENCODED = 1_000_000, 100_000
HASHING = Hashing("id", 16, 64, None)

CHATS: dict[str, Shape] = {
    "ascii": lambda size: chat(text_of(size)),
    "one emoji": lambda size: chat(text_of(size) + "🦙"),
    "one escaped emoji": lambda size: chat(text_of(size) + "🦙", ensure_ascii=True),
    "a control token": lambda size: chat(text_of(size) + "<|im_end|>🦙"),
    "chinese": lambda size: chat("访问机器学习" * (size // 18)),
    "many messages": lambda size: chat(*[text_of(500)[:200]] * (size // 250)),
}
COMPLETIONS: dict[str, Shape] = {
    "a text": lambda size: json.dumps({"model": "m", "prompt": text_of(size)}).encode(),
    "short ids": lambda size: completion("1," * (size // 2) + "1"),
    "ids that are objects": lambda size: completion("300," * (size // 4) + "300"),
    "lists of ids": lambda size: completion(
        ",".join(["[" + "300," * (size // 4000) + "1]"] * 1000)
    ),
}


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        kept = work()
        assert kept is not None
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", CHATS.values(), ids=CHATS)
def test_a_chat_takes_no_more_than_was_said(shape: Shape) -> None:
    large, body = shape(DECODED), shape(ENCODED)
    encoder = PromptEncoder(byte_tokenizer_files())
    request = parse_chat(body)

    decoded = peak(lambda: (parse_chat(large), with_client(large, "salt", None)))
    encoded = peak(lambda: encode(request, encoder, "d", HASHING))

    assert decoded <= decoding_bytes(large, has_ids=False)
    assert encoded <= encoding_bytes(request, len(body))


@pytest.mark.parametrize("shape", COMPLETIONS.values(), ids=COMPLETIONS)
def test_a_completion_takes_no_more_than_was_said(shape: Shape) -> None:
    large, body = shape(DECODED), shape(ENCODED)
    encoder = PromptEncoder(byte_tokenizer_files(), vocab_size=1000)
    request = parse_completion(body)

    decoded = peak(lambda: (parse_completion(large), with_client(large, "salt", None)))
    encoded = peak(lambda: encode(request, encoder, "d", HASHING))

    assert decoded <= decoding_bytes(large, has_ids=True)
    assert encoded <= encoding_bytes(request, len(body))


def test_a_large_body_of_ascii_needs_a_few_times_itself() -> None:
    body = chat(text_of(6_000_000))

    assert decoding_bytes(body, has_ids=False) < 6 * len(body)
