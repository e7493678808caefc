"""What a stand-in engine says, as bytes: streams of text or chat, whole answers, and the few pages
that routers ask a server for before they send it anything. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from kvoy_contract import sse
from kvoy_contract.names import CHAT_COMPLETIONS_PATH, COMPLETIONS_PATH, MODELS_PATH

MODEL = "bench"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_CREATED = 1_700_000_000
_HEX_ID = "0123456789abcdef0123456789abcdef"
_WORDS = {1234: " word", 4321: " more"}
_MAX_MODEL_LEN = 131072
_STATUS_LINES = {200: b"200 OK", 404: b"404 Not Found"}


class Body(msgspec.Struct):
    """What counts of a request."""

    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """The newer name; some routers replace the older one by it."""
    user: str = ""

    @property
    def num_tokens(self) -> int:
        return self.max_tokens or self.max_completion_tokens or 16


def generates(path: bytes) -> bool:
    return path.decode("latin-1") in (CHAT_COMPLETIONS_PATH, COMPLETIONS_PATH)


def is_chat(path: bytes) -> bool:
    return path == CHAT_COMPLETIONS_PATH.encode()


def word_events(chat: bool, wants_ids: bool) -> tuple[bytes, ...]:
    """What a stream says in turn: an event with one word, framed as an HTTP chunk; with that of its
    token id where asked. All equally long, and not the same again and again: LiteLLM ends a stream
    that repeats itself a hundred times."""
    events = []
    for token_id, word in _WORDS.items():
        event = http_chunk(sse.data_event(_chunk(chat, word, None)))
        if wants_ids:
            event += http_chunk(sse.token_ids_event([sse.ChoiceIds(0, [token_id])]))
        events.append(event)
    return tuple(events)


def stream_end(chat: bool) -> bytes:
    return http_chunk(sse.data_event(_chunk(chat, "", "length")) + sse.DONE) + b"0\r\n\r\n"


def whole_answer(chat: bool, num_tokens: int, num_prompt_tokens: int) -> bytes:
    text = _WORDS[1234] * num_tokens
    part: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    )
    return _document(
        200,
        {
            **_head(chat, "chat.completion" if chat else "text_completion"),
            "choices": [{"index": 0, **part, "logprobs": None, "finish_reason": "length"}],
            "usage": {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt_tokens + num_tokens,
            },
        },
    )


def page(path: bytes) -> bytes:
    """The answer to a path that generates nothing: health, models, else 404."""
    if path == b"/health":
        return _document(200, {"status": "ok"})
    if path == MODELS_PATH.encode():
        model = {
            "id": MODEL,
            "object": "model",
            "created": _CREATED,
            "owned_by": "kvoy",
            "max_model_len": _MAX_MODEL_LEN,
        }
        return _document(200, {"object": "list", "data": [model]})
    return _document(404, {"error": {"message": "There is nothing here.", "type": "not_found"}})


def _chunk(chat: bool, text: str, finish_reason: str | None) -> bytes:
    part: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    return msgspec.json.encode(
        {
            **_head(chat, "chat.completion.chunk" if chat else "text_completion"),
            "choices": [{"index": 0, **part, "logprobs": None, "finish_reason": finish_reason}],
        }
    )


def _head(chat: bool, kind: str) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{_HEX_ID}",
        "object": kind,
        "created": _CREATED,
        "model": MODEL,
    }


def _document(status: int, value: Any) -> bytes:
    body = msgspec.json.encode(value)
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (_STATUS_LINES[status], len(body)) + body


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
