"""Server-sent events: encoding, and a parser that takes the bytes in whatever pieces they arrive.

The parser follows the HTML standard for what an OpenAI stream uses: lines end in LF, CR or CRLF; an
event ends at an empty line; several `data` lines are joined by LF; a line that begins with a colon
is a comment. Fields other than `data` are passed over. `SseEvent.raw` holds an event's bytes as
they came, so that a proxy forwards them untouched.

A native engine that is asked for token ids says them in an event of a comment alone, behind the
events of one write and in an HTTP chunk of its own:

    : kvoy-ids <choice> <id>,<id>,...[;<choice> <id>,...]

It closes that write: what the events before it say of a choice is exactly these ids, so another
engine that is given all ids up to here goes on behind those events. A `!` behind the ids marks a
choice whose finish reason is among them. A choice that has begun without any id has an empty list.
A single id has seven digits, so that nearly all of these chunks are equally long: a router tells by
a read's last bytes where to cut it, and passes the chunk before the cut on as it is. Whoever reads
them takes any number of digits, and any framing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvoy_contract.errors import ApiError, UpstreamFailed

DONE = b"data: [DONE]\n\n"
DONE_PAYLOAD = b"[DONE]"
TOKEN_IDS_COMMENT = b": kvoy-ids "
MAX_EVENT_BYTES = 8 << 20
"""An event that grows beyond it is an error: a broken peer must not fill the memory."""

_BOM = b"\xef\xbb\xbf"


def data_event(payload: bytes) -> bytes:
    """An event with `payload` as its data; the payload has no line end in it (JSON never needs
    one).
    """
    return b"data: " + payload + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An OpenAI error object as an event, for a stream whose status line has gone out already."""
    return data_event(error.to_json())


class ChoiceIds(NamedTuple):
    """What the chunks of one write say of one choice."""

    choice: int
    token_ids: Sequence[int]
    is_ended: bool = False
    """Whether they tell its finish reason."""


def token_ids_event(choices: Iterable[ChoiceIds]) -> bytes:
    """The event that closes a write; see the module's text."""
    parts = [
        b"%d %s%s" % (choice, _ids_text(ids), b"!" if is_ended else b"")
        for choice, ids, is_ended in choices
    ]
    return TOKEN_IDS_COMMENT + b";".join(parts) + b"\n\n"


def _ids_text(ids: Sequence[int]) -> bytes:
    if len(ids) == 1:
        return b"%07d" % ids[0]
    return ",".join(map(str, ids)).encode()


def parse_token_ids(text: bytes) -> list[ChoiceIds]:
    """What follows `TOKEN_IDS_COMMENT` in its line. Raises ValueError where it is malformed."""
    found = []
    for part in text.strip().split(b";"):
        choice, _, ids = part.partition(b" ")
        is_ended = ids.endswith(b"!")
        numbers = ids.removesuffix(b"!").split(b",")
        found.append(ChoiceIds(int(choice), [int(i) for i in numbers if i], is_ended))
    return found


def parse_token_ids_comment(line: bytes) -> list[ChoiceIds] | None:
    """The token ids in such a comment line; None for any other line.

    Raises ValueError for one that is malformed.
    """
    if not line.startswith(TOKEN_IDS_COMMENT):
        return None
    return parse_token_ids(line[len(TOKEN_IDS_COMMENT) :])


@dataclass(frozen=True, slots=True)
class SseEvent:
    data: bytes | None
    """The `data` lines joined by LF; None for an event without any (comments alone)."""
    comments: tuple[bytes, ...]
    """Comment lines, with their colon and without their line end."""
    raw: bytes
    """All bytes of the event, its closing empty line included."""

    @property
    def is_done(self) -> bool:
        return self.data == DONE_PAYLOAD


class SseParser:
    """Turns pieces of a byte stream into events; any split of the stream gives the same ones.

    A CR at the end of a piece may be half of a CRLF: the LF that follows is then taken with it, as
    the first byte of the next event's `raw` if the CR has already closed an event.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._buffer = bytearray()
        self._event_start = 0
        self._line_start = 0
        self._scanned = 0
        self._data: list[bytes] = []
        self._comments: list[bytes] = []
        self._skip_lf = False
        self._at_stream_start = True

    def feed(self, piece: bytes) -> list[SseEvent]:
        """The events that `piece` completes. Raises UpstreamFailed for too large an event."""
        self._buffer += piece
        events: list[SseEvent] = []
        while (end := self._find_line_end()) is not None:
            self._take_line(end, events)
        self._drop_consumed()
        if len(self._buffer) > self._max_event_bytes:
            raise UpstreamFailed(f"An event is larger than {self._max_event_bytes} bytes.")
        return events

    @property
    def has_partial_event(self) -> bool:
        """Whether an unfinished event is held: at its end, the stream was cut short."""
        return bool(self._buffer.strip(b"\r\n") or self._data or self._comments)

    def _find_line_end(self) -> int | None:
        """Index of the next CR or LF; the LF of a CRLF is passed over first."""
        buffer = self._buffer
        if self._skip_lf and self._line_start < len(buffer):
            self._skip_lf = False
            if buffer[self._line_start] == 0x0A:
                self._line_start += 1
                self._scanned = self._line_start
        lf = buffer.find(b"\n", self._scanned)
        cr = buffer.find(b"\r", self._scanned, lf if lf >= 0 else len(buffer))
        end = cr if cr >= 0 else lf
        if end < 0:
            self._scanned = len(buffer)
            return None
        return end

    def _take_line(self, end: int, events: list[SseEvent]) -> None:
        line = bytes(self._buffer[self._line_start : end])
        if self._at_stream_start:
            self._at_stream_start = False
            line = line.removeprefix(_BOM)
        self._skip_lf = self._buffer[end] == 0x0D
        self._line_start = self._scanned = end + 1
        if line.startswith(b":"):
            self._comments.append(line)
        elif line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            self._data.append(b"")
        elif not line:
            self._end_event(events)

    def _end_event(self, events: list[SseEvent]) -> None:
        raw = bytes(self._buffer[self._event_start : self._line_start])
        self._event_start = self._line_start
        if self._data or self._comments:
            data = b"\n".join(self._data) if self._data else None
            events.append(SseEvent(data, tuple(self._comments), raw))
            self._data, self._comments = [], []

    def _drop_consumed(self) -> None:
        if self._event_start:
            del self._buffer[: self._event_start]
            self._line_start -= self._event_start
            self._scanned -= self._event_start
            self._event_start = 0
