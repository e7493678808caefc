"""A stream whose engine says its token ids: they are remembered for another engine, and end here.

What stands before an ids event is told to the client together with remembering the ids, and not
before that event has come whole. So whenever the engine dies, what is remembered is exactly what
the client has, and another engine goes on without a gap and without a repetition.

The usual write is two chunks: one of its event, and one of its single id, as long as ever. Of a
read of such writes the client gets the first ones as they are, and the second ones are kept."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from kvoy_contract.sse import TOKEN_IDS_COMMENT, ChoiceIds, token_ids_event
from kvoy_router.errors import ConnectionBroken, EngineErrored
from kvoy_router.http_client import Exchange
from kvoy_router.http_message import Headers
from kvoy_router.http_response import Response
from kvoy_router.relay import StreamRelay, completed
from kvoy_router.stream_progress import StreamProgress
from kvoy_router.upstream_connection import CHUNK_HEADS, Reader

_USUAL_IDS = token_ids_event([ChoiceIds(0, [0])])
_USUAL_HEAD = b"%x\r\n%b" % (len(_USUAL_IDS), TOKEN_IDS_COMMENT)
_USUAL_BYTES = len(_USUAL_IDS) - len(TOKEN_IDS_COMMENT) + len(b"\r\n")
_IDS_EVENT = re.compile(re.escape(TOKEN_IDS_COMMENT) + rb"([^\n]*\n)\n")
_ERROR_EVENT = re.compile(rb'(?:\A|\n)data: ?(\{\s*"error"[^\n]*)\n\n\Z')


def _split_usual(data: bytes) -> tuple[bytes, bytes] | None:
    """What several usual writes tell, and what they say; None for anything else."""
    told, said = [], []
    while data:
        event, _, rest = data.partition(_USUAL_HEAD)
        size = len(event)
        if len(rest) < _USUAL_BYTES or size >= len(CHUNK_HEADS):
            return None
        if not event.startswith(CHUNK_HEADS[size]):
            return None
        told.append(event)
        said.append(rest[:_USUAL_BYTES])
        data = rest[_USUAL_BYTES:]
    return b"".join(told), b"".join(said)


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

    def reader(self, long_way: Reader) -> Reader:
        """Takes reads of usual writes. Their chunks' sizes prove it, whatever they contain."""
        heads, ids_head, ids_bytes = CHUNK_HEADS, _USUAL_HEAD, _USUAL_BYTES
        max_bytes = len(heads)
        write = self._response.write_chunk
        said = self._progress.said

        def read(data: bytes) -> None:
            nonlocal said
            told, _, ids = data.partition(ids_head)
            size = len(told)
            if len(ids) == ids_bytes and size < max_bytes and told.startswith(heads[size]):
                said += ids
                write(told)
            elif several := _split_usual(data):
                told, ids = several
                said += ids
                write(told)
            else:
                long_way(data)

        return read

    def has_moved(self) -> bool:
        return self._progress.settle()

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
        self._note_end(self._held)

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
