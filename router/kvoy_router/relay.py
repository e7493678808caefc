"""An engine's answer on its way to the client: whole for a plain one, piece by piece for a stream.

A stream is passed on as it comes, up to the last complete event: so an error event can follow at
any moment without falling into the middle of another. The first byte decides: before it the
client has seen nothing and another engine may be tried, after it an error can only be told inside
the stream.

Token ids that the router has asked an engine for travel as comments of the stream; they are for the
router and end here."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvoy_contract.errors import UpstreamFailed
from kvoy_contract.sse import MAX_EVENT_BYTES, SseParser, parse_token_ids_comment
from kvoy_router.errors import BadResponse, ConnectionBroken
from kvoy_router.http_client import Exchange
from kvoy_router.http_message import Headers
from kvoy_router.http_response import Response

MAX_ANSWER_BYTES = 256 * 1024 * 1024
EVENT_STREAM = b"text/event-stream"
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_FRAMED_EVENT_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")
_DONE_TAIL_BYTES = 64
# A model may well write "[DONE]" or "error"; only an event of its own means it.
_DONE = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\]\s*\Z")
_ERROR = re.compile(rb'data: ?\{\s*"error"\s*:')


class StreamRelay:
    """Passes one event stream on. `has_begun` once the client has seen a byte of it."""

    def __init__(
        self,
        exchange: Exchange,
        response: Response,
        headers: Headers,
        on_begin: Callable[[], None],
        on_token_ids: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        """`on_token_ids` hears each choice's token ids, where the engine was asked for them; the
        comments that carry them are then taken out of the stream."""
        self._exchange = exchange
        self._response = response
        self._headers = headers
        self._on_begin = on_begin
        self._held = b""
        self._last = b""
        self._on_token_ids = on_token_ids
        self._parser = SseParser() if on_token_ids is not None else None
        self.has_begun = False

    async def run(self) -> None:
        """Raises what `Exchange.relay` raises, BadResponse for what is no event stream, and
        ConnectionBroken for one that ends without saying so."""
        if self._exchange.media_type != EVENT_STREAM:
            raise BadResponse("it answered a streamed request with something else")
        response, connection = self._response, self._exchange.connection
        response.on_pause = connection.pause_reading
        response.on_resume = connection.resume_reading
        if self._parser is not None:
            await self._exchange.relay(self._push_public)
        else:
            frame_sink = self._push_frame if response.takes_frames else None
            await self._exchange.relay(self._push, frame_sink)
        if not self.has_begun:
            raise BadResponse("its stream was empty")
        tail = self._last[-_DONE_TAIL_BYTES:] + self._held
        if _DONE.search(tail):
            response.write(self._held)
        elif not _ERROR.search(self._last):
            raise ConnectionBroken("its stream ended early")

    def _push(self, data: bytes) -> None:
        if self._held or not data.endswith(_EVENT_ENDS):
            data = self._whole_events(data)
            if not data:
                return
        self._last = data
        if not self.has_begun:
            self._begin()
        self._response.write(data)

    def _push_frame(self, frame: bytes) -> None:
        """The usual case: one chunk with one event, which travels on as it is."""
        if frame.endswith(_FRAMED_EVENT_ENDS) and self.has_begun and not self._held:
            self._last = frame
            self._response.write_frame(frame)
        else:
            self._push(frame[frame.find(b"\r\n") + 2 : -2])

    def _push_public(self, data: bytes) -> None:
        """Keep what is for the router; only whole events go on, without it."""
        assert self._parser is not None
        try:
            events = self._parser.feed(data)
            for event in events:
                for comment in event.comments:
                    self._take_token_ids(comment)
        except (UpstreamFailed, ValueError) as error:
            self._exchange.connection.fail(BadResponse(f"its stream is malformed: {error}"))
            return
        if public := b"".join([event.public for event in events]):
            self._push(public)

    def _take_token_ids(self, comment: bytes) -> None:
        found = parse_token_ids_comment(comment)
        if found is not None and self._on_token_ids is not None:
            self._on_token_ids(*found)

    def _whole_events(self, data: bytes) -> bytes:
        data = self._held + data
        end = max(data.rfind(mark) + len(mark) for mark in _EVENT_ENDS)
        if end < len(_EVENT_ENDS[1]):
            end = 0
        self._held = data[end:]
        if len(self._held) > MAX_EVENT_BYTES:
            self._exchange.connection.fail(BadResponse("an event of its stream is too large"))
        return data[:end]

    def _begin(self) -> None:
        self.has_begun = True
        self._on_begin()
        self._response.start(200, self._headers)
        if self._response.is_paused:
            self._exchange.connection.pause_reading()


async def relay_whole(
    exchange: Exchange, response: Response, headers: Headers, on_begin: Callable[[], None]
) -> None:
    """Pass on an answer that comes as one JSON document; nothing is sent before all of it is here.

    Raises what `Exchange.read` raises, and BadResponse for an empty or foreign body.
    """
    body = await exchange.read(MAX_ANSWER_BYTES)
    if not body or exchange.media_type != b"application/json":
        raise BadResponse("its answer is not a JSON document")
    on_begin()
    response.send(200, headers, body)
