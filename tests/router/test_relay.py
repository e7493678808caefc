"""A stream on its way through the relay: what passes, what ends here, what counts as its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvoy_contract.sse import DONE, data_event
from kvoy_router.errors import ConnectionBroken, UpstreamError
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
        self.failure_at_end: UpstreamError | None = None
        self.connection = SimpleNamespace(
            pause_reading=lambda: None,
            resume_reading=lambda: None,
            detach=lambda: None,
            is_complete=False,
            fail=self._fail,
        )

    def _fail(self, error: UpstreamError) -> None:
        self.failure = error

    async def relay(self, sink: Callable[[bytes], None], short_cut: object = None) -> None:
        for piece in self._pieces:
            sink(piece)
            await asyncio.sleep(0)
            if self.failure is not None:
                raise self.failure
        if self.failure_at_end is not None:
            raise self.failure_at_end


class Client:
    """What a client sees, where the relay expects a response."""

    takes_frames = False
    is_paused = False

    def __init__(self) -> None:
        self.seen = b""
        self.status = 0
        self.on_pause = self.on_resume = lambda: None

    def start(self, status: int, headers: object) -> None:
        assert status == 200
        self.status = status

    def write(self, data: bytes) -> None:
        self.seen += data


def relay_of(upstream: Upstream, client: Client) -> StreamRelay:
    exchange = cast(Exchange, cast(Any, upstream))
    response = cast(Response, cast(Any, client))
    return StreamRelay(exchange, response, [], lambda: None)


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
async def test_what_a_model_writes_does_not_count_as_the_end(last: bytes) -> None:
    client = Client()

    with pytest.raises(ConnectionBroken):
        await relay_of(Upstream(data_event(last)), client).run()

    assert client.seen == data_event(last)


@pytest.mark.parametrize(
    "end", [DONE, b"data:[DONE]\r\n\r\n", b'data: {"error": {"message": "x"}}\n\n']
)
async def test_an_end_mark_or_an_error_event_ends_the_stream(end: bytes) -> None:
    client = Client()

    await relay_of(Upstream(data_event(CHUNK % b"a"), end), client).run()

    assert client.seen == data_event(CHUNK % b"a") + end


async def test_a_break_behind_the_end_mark_is_no_failure() -> None:
    client = Client()
    upstream = Upstream(data_event(CHUNK % b"a") + DONE)
    upstream.failure = ConnectionBroken("it closed the connection")

    await relay_of(upstream, client).run()

    assert client.seen.endswith(DONE)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n\r"])
async def test_an_end_mark_without_its_end_is_completed(end: bytes, breaks: bool) -> None:
    client = Client()
    upstream = Upstream(data_event(CHUNK % b"a"), end)
    if breaks:
        upstream.failure_at_end = ConnectionBroken("it closed the connection")

    await relay_of(upstream, client).run()

    assert client.seen == data_event(CHUNK % b"a") + DONE
