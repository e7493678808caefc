"""A stream on its way through the relay: what passes, what ends here, what counts as its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvoy_contract.sse import DONE, data_event, token_ids_comment
from kvoy_router.errors import BadResponse, ConnectionBroken, UpstreamError
from kvoy_router.http_client import Exchange
from kvoy_router.http_response import Response
from kvoy_router.relay import StreamRelay

CHUNK = b'{"choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":null}]}'


class Upstream:
    """An engine's answer in given pieces, where the relay expects an exchange."""

    media_type = b"text/event-stream"

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self.failure: UpstreamError | None = None
        self.connection = SimpleNamespace(
            pause_reading=lambda: None, resume_reading=lambda: None, fail=self._fail
        )

    def _fail(self, error: UpstreamError) -> None:
        self.failure = error

    async def relay(self, sink: Callable[[bytes], None], frame_sink: object = None) -> None:
        for piece in self._pieces:
            sink(piece)
            await asyncio.sleep(0)
            if self.failure is not None:
                raise self.failure


class Client:
    """What a client sees, where the relay expects a response."""

    takes_frames = False
    is_paused = False

    def __init__(self) -> None:
        self.seen = b""
        self.on_pause = self.on_resume = lambda: None

    def start(self, status: int, headers: object) -> None:
        assert status == 200

    def write(self, data: bytes) -> None:
        self.seen += data


def relay_of(
    upstream: Upstream, client: Client, on_token_ids: Callable[[int, list[int]], None] | None = None
) -> StreamRelay:
    exchange = cast(Exchange, cast(Any, upstream))
    response = cast(Response, cast(Any, client))
    return StreamRelay(exchange, response, [], lambda: None, on_token_ids)


def cut(stream: bytes, size: int) -> list[bytes]:
    return [stream[i : i + size] for i in range(0, len(stream), size)]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
async def test_asked_for_token_ids_are_kept_and_never_shown(size: int) -> None:
    first, second = data_event(CHUNK % b"a"), data_event(CHUNK % b"b")
    stream = (
        token_ids_comment(0, [5, 6])
        + first
        + token_ids_comment(1, [7])
        + b"\n"  # ids whose text is held back: an event of a comment alone
        + b": keep-alive\n\n"
        + token_ids_comment(0, [8])
        + second
        + DONE
    )
    client, ids = Client(), []

    await relay_of(
        Upstream(*cut(stream, size)), client, lambda choice, new: ids.append((choice, new))
    ).run()

    assert ids == [(0, [5, 6]), (1, [7]), (0, [8])]
    assert client.seen == first + b": keep-alive\n\n" + second + DONE


async def test_a_malformed_list_of_token_ids_fails_the_engine() -> None:
    upstream = Upstream(b": kvoy-ids 0 1,x\n" + data_event(CHUNK % b"a"))

    with pytest.raises(BadResponse):
        await relay_of(upstream, Client(), lambda choice, ids: None).run()


@pytest.mark.parametrize(
    "last",
    [
        CHUNK % b"[DONE]",
        CHUNK % b"data: [DONE]",
        b'{"choices":[{"logprobs":{"content":[{"token":"error"}]}}]}',
        b'{"choices":[{"logprobs":{"top_logprobs":[{"error":-1.0}]}}]}',
        CHUNK % b'data: {\\"error\\": 1}',
    ],
)
@pytest.mark.parametrize("with_ids", [False, True])
async def test_what_a_model_writes_does_not_count_as_the_end(last: bytes, with_ids: bool) -> None:
    client = Client()
    relay = relay_of(
        Upstream(data_event(last)), client, (lambda choice, ids: None) if with_ids else None
    )

    with pytest.raises(ConnectionBroken):
        await relay.run()

    assert client.seen == data_event(last)


@pytest.mark.parametrize(
    "end", [DONE, b"data:[DONE]\r\n\r\n", b"data: [DONE]", b'data: {"error": {"message": "x"}}\n\n']
)
async def test_an_end_mark_or_an_error_event_ends_the_stream(end: bytes) -> None:
    client = Client()

    await relay_of(Upstream(data_event(CHUNK % b"a"), end), client).run()

    assert client.seen == data_event(CHUNK % b"a") + end
