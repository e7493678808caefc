"""The page for users has a row for every reason that the operator gives, and for no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvoy_operator import transitions
from kvoy_operator.failures import FailureReason
from kvoy_operator.rollout import Phase

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
GIVERS = {"Condition", "Refusal", "RouterState", "_refusal"}
"""Whose arguments are reasons, where they are one word in capitals."""
WORD = re.compile(r"[A-Z][A-Za-z]+")


def _words(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and WORD.fullmatch(value):
            yield value


def _reasons_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in GIVERS:
            yield from _words(node.args)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            yield from _words(node.value.elts[:1])


def _given() -> set[str]:
    sources = (ROOT / "operator/kvoy_operator").rglob("*.py")
    found = {reason for source in sources for reason in _reasons_of(source.read_text())}
    return found | set(FailureReason) | set(Phase)


def _told_by_events() -> set[str]:
    return {*transitions._GOOD_NEWS.values(), *transitions._BAD_NEWS.values()}


def _rows() -> set[str]:
    """Reasons begin with a capital; what a stream ends with, in lower case, is the router's."""
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line[:3] == "| `"]
    return {reason for cell in cells for reason in re.findall(r"`([A-Z]\w+)`", cell)}


def test_the_reasons_in_the_code_are_found() -> None:
    assert {"NameClash", "Loading", "ApiServerFault", "AllReady", "CrashLoop", "Settled"} <= (
        _given()
    )


def test_every_reason_has_a_row_and_every_row_a_reason() -> None:
    assert _rows() == _given()


def test_every_reason_of_an_event_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))

    assert _told_by_events() <= named
