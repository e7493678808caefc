"""Requests as bytes, made before a run starts so that making them costs nothing during it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvoy_contract.names import CHAT_COMPLETIONS_PATH, COMPLETIONS_PATH

JSON_CONTENT_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    body: bytes
    content_type: str = JSON_CONTENT_TYPE
    headers: tuple[tuple[str, str], ...] = ()

    def to_bytes(self, host: str) -> bytes:
        """The whole HTTP/1.1 message."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"host: {host}",
            f"content-type: {self.content_type}",
            f"content-length: {len(self.body)}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


def completion(
    model: str, prompt: Sequence[int] | str, max_tokens: int, *, stream: bool = True, **extra: Any
) -> Request:
    """Exactly `max_tokens` tokens: end tokens are ignored. Greedy unless `extra` says otherwise;
    a field that `extra` sets to None is left out."""
    return Request(COMPLETIONS_PATH, _body(model, max_tokens, stream, {"prompt": prompt}, extra))


def chat(
    model: str,
    messages: Sequence[Mapping[str, str]],
    max_tokens: int,
    *,
    stream: bool = True,
    **extra: Any,
) -> Request:
    content = {"messages": list(messages)}
    return Request(CHAT_COMPLETIONS_PATH, _body(model, max_tokens, stream, content, extra))


def _body(
    model: str,
    max_tokens: int,
    stream: bool,
    content: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> bytes:
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": stream,
        **content,
        **extra,
    }
    if stream:
        fields["stream_options"] = {"include_usage": True}
    return msgspec.json.encode({name: v for name, v in fields.items() if v is not None})
