"""What a test tells the fake engine to answer, and what it received."""

from __future__ import annotations

import asyncio
import enum
import json
from dataclasses import dataclass
from typing import Any

from kvoy_contract import envelope as envelopes
from kvoy_contract import names


class Fault(enum.StrEnum):
    """How an answer breaks. `fault_after` counts the pieces that still come."""

    NONE = "none"
    CLOSE_BEFORE_HEAD = "close_before_head"
    RESET_BEFORE_HEAD = "reset_before_head"
    HANG_BEFORE_HEAD = "hang_before_head"
    NOT_HTTP = "not_http"
    RESET_AFTER_HEAD = "reset_after_head"
    EMPTY_BODY = "empty_body"
    CUT = "cut"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Script:
    """One answer."""

    pieces: tuple[str, ...] = ("Hello", " world", "!")
    delay_s: float = 0.0
    """Before the head."""
    gap_s: float = 0.0
    """Before each piece but the first."""
    gate: asyncio.Event | None = None
    """The head waits for it."""
    status: int = 200
    body: bytes | None = None
    """Instead of a completion."""
    headers: tuple[tuple[str, str], ...] = ()
    cached_tokens: int = 0
    fault: Fault = Fault.NONE
    fault_after: int = 1
    keep_alive: bool = True


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    """The client's own body, without the envelope."""
    envelope: envelopes.Envelope | None = None

    def json(self) -> Any:
        return json.loads(self.body)


def completion(request: ReceivedRequest, script: Script, fields: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, for chat or for plain completions."""
    text = "".join(script.pieces)
    is_chat = request.path == names.CHAT_COMPLETIONS_PATH
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return {
        "id": "fake-1",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 1,
        "model": fields.get("model", ""),
        "choices": [choice],
        "usage": usage(request, script),
    }


def usage(request: ReceivedRequest, script: Script) -> dict[str, Any]:
    envelope = request.envelope
    num_prompt_tokens = len(envelope.token_ids) // 4 if envelope else 1
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(script.pieces),
        "total_tokens": num_prompt_tokens + len(script.pieces),
        "prompt_tokens_details": {"cached_tokens": script.cached_tokens},
    }


def chunk(is_chat: bool, fields: dict[str, Any], choices: list[Any]) -> dict[str, Any]:
    return {
        "id": "fake-1",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": 1,
        "model": fields.get("model", ""),
        "choices": choices,
    }
