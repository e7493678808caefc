"""How log lines look in every component: a fixed event text, then the record's own fields."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from functools import lru_cache
from itertools import islice

FORMATS = ("text", "json")

_is_plain = re.compile(r'[^\s"=\x00-\x1f]+').fullmatch
_NUM_STANDARD = len(logging.makeLogRecord({}).__dict__)
"""A record's own attributes stand before those of `extra`, which are set last."""
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What was given as `extra`."""
    items = islice(record.__dict__.items(), _NUM_STANDARD, None)
    return {key: value for key, value in items if key not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`date time level event key=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = _second(int(record.created))
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower()} {record.getMessage()}"
        items = islice(record.__dict__.items(), _NUM_STANDARD, None)
        line += "".join([f" {key}={_text(value)}" for key, value in items if key not in _STANDARD])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


@lru_cache(maxsize=1)
def _second(created_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created_s))


def _text(value: object) -> str:
    if isinstance(value, str):
        text = value
    elif value is None:
        return "None"
    elif isinstance(value, float):
        return f"{value:.4g}"
    else:
        text = str(value)
        if isinstance(value, int):
            return text
    return text if _is_plain(text) else json.dumps(text)


def configure(level: str, style: str) -> None:
    """Send all records to standard error; `style` is one of FORMATS.

    JSON goes to standard output: whoever collects it takes lines of standard error for errors.
    """
    is_json = style == "json"
    handler = logging.StreamHandler(sys.stdout if is_json else sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # No formatter here shows where a record was made, by which thread or process: do not look.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
