"""Events of a stream that say which stream they are of, and the how manieth. Pure.

The source renders them and the client takes them apart, so that whatever stands between the two is
seen to have changed nothing: not the order, not the number, not a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvoy_contract import sse

_SLOT = "@"
_TEMPLATE = sse.data_event(
    msgspec.json.encode(
        {
            "id": "chatcmpl-0123456789abcdef0123456789abcdef",
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": "bench",
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": _SLOT},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ],
        }
    )
)
_BEFORE, _AFTER = _TEMPLATE.split(_SLOT.encode())
_HEAD_BYTES, _TAIL_BYTES = len(_BEFORE), len(_AFTER)


def event(label: str, number: int) -> bytes:
    """The event with this number, from 0, of the stream that is called `label`."""
    return b"%b %b.%d%b" % (_BEFORE, label.encode(), number, _AFTER)


def number_in(label: bytes, data: bytes) -> int | None:
    """The number of an event of this stream; None for anything else than `event` makes."""
    if not data.startswith(_BEFORE) or not data.endswith(_AFTER):
        return None
    name, _, number = data[_HEAD_BYTES + 1 : -_TAIL_BYTES].rpartition(b".")
    if name != label or not number.isdigit():
        return None
    return int(number)


@dataclass(slots=True)
class Tally:
    """What became of all events of all streams."""

    events: int = 0
    """In their place."""
    lost: int = 0
    repeated: int = 0
    """Came again, or behind a later one."""
    strange: int = 0
    """Neither an event of the stream nor the way that it should end."""
    streams: int = 0
    """That came to their end, with all events."""
    failed: int = 0
    """Streams that broke off, or were refused."""
    failure: str = ""
    """What the first of them said."""

    @property
    def num_wrong(self) -> int:
        return self.lost + self.repeated + self.strange + self.failed

    def fail(self, reason: str) -> None:
        self.failed += 1
        self.failure = self.failure or reason


class StreamCheck:
    """One stream's events, as they come."""

    __slots__ = ("_label", "_tally", "expected", "num_events")

    def __init__(self, label: str, num_events: int, tally: Tally) -> None:
        self._label = label.encode()
        self._tally = tally
        self.num_events = num_events
        self.expected = 0
        """The number that comes next."""

    def on_event(self, data: bytes) -> None:
        number = number_in(self._label, data)
        if number is None:
            self._tally.strange += 1
        elif number < self.expected:
            self._tally.repeated += 1
        else:
            self._tally.lost += number - self.expected
            self._tally.events += 1
            self.expected = number + 1

    def on_end(self) -> None:
        """The stream says that it is complete."""
        self._tally.lost += max(0, self.num_events - self.expected)
        self._tally.streams += 1
