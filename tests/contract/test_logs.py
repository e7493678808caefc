"""Log lines: one per event, fields that cannot break the line."""

from __future__ import annotations

import json
import logging

from kvoy_contract.logs import JsonFormatter, TextFormatter


def record(**fields: object) -> logging.LogRecord:
    made = logging.LogRecord("kvoy_router.x", logging.INFO, "f.py", 1, "request", None, None)
    made.__dict__.update(fields)
    return made


def test_a_text_line_quotes_what_could_be_misread() -> None:
    line = TextFormatter().format(
        record(a="plain", b="two words", c='x="y"', d="", e=None, f=0.123456, g="line\nbreak")
    )

    _, _, rest = line.partition(" info request ")
    assert rest == 'a=plain b="two words" c="x=\\"y\\"" d="" e=None f=0.1235 g="line\\nbreak"'


def test_a_json_line_holds_all_fields() -> None:
    entry = json.loads(JsonFormatter().format(record(request_id="r", ttft_s=0.5)))

    assert (entry["event"], entry["level"]) == ("request", "info")
    assert (entry["request_id"], entry["ttft_s"]) == ("r", 0.5)
