"""A stream whose engine says its token ids: they are remembered for another engine, and end here.

What stands before an ids event is told to the client together with remembering the ids, and not
before that event has come whole. So whenever the engine dies, what is remembered is exactly what
the client has, and another engine goes on without a gap and without a repetition.

The usual read is one chunk of one write: a search, two slices and a new chunk header."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from kvoy_contract.sse import TOKEN_IDS_COMMENT
from kvoy_router.errors import ConnectionBroken, EngineErrored
from kvoy_router.http_client import Exchange
from kvoy_router.http_message import Headers
from kvoy_router.http_response import Response
from kvoy_router.relay import StreamRelay, completed
from kvoy_router.stream_progress import StreamProgress

_IDS_LINE = b"\n" + TOKEN_IDS_COMMENT
_IDS_LINE_BYTES = len(_IDS_LINE)
_FRAMED_END = b"\n\n\r\n"
_IDS_EVENT = re.compile(re.escape(TOKEN_IDS_COMMENT) + rb"([^\n]*\n)\n")
_ERROR_EVENT = re.compile(rb'(?:\A|\n)data: ?(\{\s*"error"[^\n]*)\n\n\Z')


class ResumableRelay(StreamRelay):
    def __init__(
        self,
        exchange: Exchange,
        response: Response,
        headers: Headers,
        on_begin: Callable[[], None],
        progress: StreamProgress,
    ) -> None:
        super().__init__(exchange, response, headers, on_begin)
        self._progress = progress

    def _push_frame(self, frame: bytes) -> None:
        cut = frame.find(_IDS_LINE)
        said = frame[cut + _IDS_LINE_BYTES : -3]
        if (
            cut > 0
            and frame.endswith(_FRAMED_END)
            and said.find(b"\n") == len(said) - 1  # else more follows it
            and self.has_begun
            and not self._held
        ):
            self._progress.take(said)
            start = frame.find(b"\n") + 1
            if cut > start:
                num_bytes = cut + 1 - start
                self._response.write_frame(b"%x\r\n%b\r\n" % (num_bytes, frame[start : cut + 1]))
        else:
            self._push(frame[frame.find(b"\r\n") + 2 : -2])

    def _push(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
        told = []
        end = 0
        for found in _IDS_EVENT.finditer(data):
            start = found.start()
            if start and data[start - 1] != 0x0A:
                continue  # a model may well write it
            told.append(data[end:start])
            self._progress.take(found[1])
            end = found.end()
        self._hold(data[end:])
        if public := b"".join(told):
            if not self.has_begun:
                self._begin()
            self._response.write(public)

    def _finish(self) -> None:
        """What follows the last ids is the stream's end, or the engine's own error."""
        held = self._held
        if self._has_end_mark():
            if not self.has_begun:
                self._begin()
            self._response.write(completed(held))
        elif found := _ERROR_EVENT.search(held):
            raise EngineErrored(_message_of(found[1]))
        else:
            raise ConnectionBroken("its stream ended early")


def _message_of(error: bytes) -> str:
    try:
        return str(msgspec.json.decode(error)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "it said an error without a message"
