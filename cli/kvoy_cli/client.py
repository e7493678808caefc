"""A small client of the OpenAI API: one streamed chat completion at a time, with its timing.

For `kvoy up` and `kvoy chat`, which want one answer shown as it comes. Blocking, on the standard
library. Knows nothing of terminals.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvoy_cli.errors import CommandError
from kvoy_contract.names import (
    CACHED_TOKENS_HEADER,
    CHAT_COMPLETIONS_PATH,
    ENGINE_HEADER,
    MODELS_PATH,
)
from kvoy_contract.sse import SseParser

Message = dict[str, str]
_READ_BYTES = 65_536


@dataclass(slots=True)
class Answer:
    """What is known of an answer; complete once its stream has ended."""

    text: str = ""
    engine: str | None = None
    """Which engine a router chose; None where the endpoint does not say."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were not computed: as the usage says, else as a router expected."""
    finish_reason: str | None = None
    started_s: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending the request to the first text."""
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None for fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        elapsed_s = self.last_token_s - self.first_token_s
        if not self.completion_tokens or self.completion_tokens < 2 or elapsed_s <= 0:
            return None
        return (self.completion_tokens - 1) / elapsed_s

    def summary(self) -> str:
        """One line for people: TTFT, rate, cached tokens, engine."""
        parts = []
        if self.ttft_s is not None:
            parts.append(f"first token after {self.ttft_s * 1e3:,.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.prompt_tokens is not None:
            parts.append(f"{self.cached_tokens or 0} of {self.prompt_tokens} prompt tokens cached")
        if self.engine:
            parts.append(f"engine {self.engine}")
        return ", ".join(parts)


class Endpoint:
    """An OpenAI endpoint such as `http://127.0.0.1:8000/v1`."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandError(f"{base_url!r} is not an endpoint such as http://127.0.0.1:8000/v1")
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._timeout_s = timeout_s
        self.base_url = f"{parts.scheme}://{parts.netloc}{self._prefix}/v1"

    def models(self) -> list[str]:
        """The names of the served models. Raises CommandError."""
        connection = self._connect()
        try:
            response = self._request(connection, "GET", MODELS_PATH, None)
            return [entry["id"] for entry in json.loads(response.read())["data"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CommandError(f"{self.base_url} does not speak the OpenAI API") from error
        finally:
            connection.close()

    def stream_chat(
        self, answer: Answer, model: str, messages: Sequence[Message], **options: Any
    ) -> Generator[str, None, None]:
        """The pieces of the answer's text as they come; fills `answer` on the way.

        Closing the generator closes the connection, which cancels the request. Raises CommandError.
        """
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **{key: value for key, value in options.items() if value is not None},
        }
        answer.started_s = time.perf_counter()
        connection = self._connect()
        try:
            response = self._request(connection, "POST", CHAT_COMPLETIONS_PATH, body)
            answer.engine = response.headers.get(ENGINE_HEADER)
            cached = response.headers.get(CACHED_TOKENS_HEADER)
            answer.cached_tokens = int(cached) if cached else None
            yield from _texts(response, answer)
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"the answer of {self.base_url} broke off: {error}") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._prefix + path, data, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"cannot reach {self.base_url}: {error}") from error
        if response.status != http.HTTPStatus.OK:
            raise CommandError(_refusal(response))
        return response


def _texts(response: http.client.HTTPResponse, answer: Answer) -> Iterator[str]:
    parser = SseParser()
    while data := response.read1(_READ_BYTES):
        for event in parser.feed(data):
            if event.is_done:
                return
            if event.data is None:
                continue
            text = _take_chunk(json.loads(event.data), answer)
            if text:
                yield text
    raise CommandError("the answer broke off before its end")


def _take_chunk(chunk: dict[str, Any], answer: Answer) -> str:
    """The chunk's text; notes its time, usage and finish reason in `answer`."""
    if "error" in chunk:
        raise CommandError(f"the answer ended with an error: {chunk['error'].get('message')}")
    usage = chunk.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)
    text = ""
    for choice in chunk.get("choices", ()):
        text += (choice.get("delta") or {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if text:
        answer.last_token_s = time.perf_counter()
        if answer.first_token_s is None:
            answer.first_token_s = answer.last_token_s
        answer.text += text
    return text


def _refusal(response: http.client.HTTPResponse) -> str:
    body = response.read(_READ_BYTES)
    try:
        message = json.loads(body)["error"]["message"]
    except (KeyError, TypeError, ValueError):
        message = body.decode(errors="replace").strip()[:300]
    return f"refused with status {response.status}: {message}"
