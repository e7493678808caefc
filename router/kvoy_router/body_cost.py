"""What is made of a request while it is read, in bytes: bounds from measured worst cases.

A text of ASCII is decoded to as many bytes, and one with a single emoji to four per character; a
token id of four characters becomes an integer of 40 bytes. The `tokenizers` library takes up to 126
bytes for each byte of a text that it encodes in one piece, and the byte tokenizer up to 29. Pure.
"""

from __future__ import annotations

import sys

from kvoy_contract.body_shape import MAX_STRUCTURE_BYTES
from kvoy_contract.openai import ChatCompletionRequest, CompletionRequest

_NARROW, _WIDE = 3, 7
"""Per byte of a body whose texts are ASCII, and of any other: the texts, and a copy of the body
that has a tenant's salt while it is written."""
_TOKEN_ID_BYTES = 40
_STRUCTURE_BYTES = 24
"""Per byte of what is neither text nor token id: empty lists take the most."""
_PIECE_BYTES = 128
"""Per byte of the longest text, which is encoded in one piece."""
_COPIES = 4
"""Of all texts: rendered, with broken control tokens, split, remembered."""
_REST_BYTES = 24
"""Per byte of everything, each of which may be a token of its own: ids, remembered ids, hashes."""


def decoding_bytes(body: bytes, has_ids: bool) -> int:
    """`has_ids`: it may be a list of token ids, which commas tell from texts."""
    # One byte is found in a hundredth of the time that two take.
    is_narrow = body.isascii() and (b"\\" not in body or b"\\u" not in body)
    num_bytes = len(body) * (_NARROW if is_narrow else _WIDE)
    num_bytes += min(len(body), MAX_STRUCTURE_BYTES) * _STRUCTURE_BYTES
    if has_ids and b"[" in body:
        num_bytes += _TOKEN_ID_BYTES * body.count(b",")
    return num_bytes


def encoding_bytes(request: ChatCompletionRequest | CompletionRequest, body_bytes: int) -> int:
    """Besides what it was decoded to."""
    texts = _texts(request)
    longest = max((min(_utf8_bytes(text), body_bytes) for text in texts), default=0)
    copies = _COPIES * sum(map(sys.getsizeof, texts))
    return _PIECE_BYTES * longest + copies + _REST_BYTES * body_bytes


def tokenizing_bytes(body: bytes) -> int:
    """Of a text in it, with the answer: each token as a number, as JSON, and as a text."""
    return 2 * _PIECE_BYTES * len(body)


def _texts(request: ChatCompletionRequest | CompletionRequest) -> list[str]:
    if isinstance(request, CompletionRequest):
        return [prompt for prompt in request.prompts if isinstance(prompt, str)]
    texts = []
    for message in request.messages:
        content = message.content or ""
        # The parts of a message may be rendered as one text.
        texts.append(content if isinstance(content, str) else "\n".join(p.text for p in content))
        texts += [text for text in (message.reasoning_content, message.reasoning) if text]
    return texts


def _utf8_bytes(text: str) -> int:
    """At most."""
    return len(text) if text.isascii() else 4 * len(text)
