"""Durations as the Gateway API writes them."""

from __future__ import annotations

import copy
import pickle

import pytest

from kvoy_operator.durations import Duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0s", 0),
        ("90s", 90),
        ("30m", 1800),
        ("1h30m", 5400),
        ("1h2m3s4ms", 3723.004),
        ("500ms", 0.5),
        ("1m1m", 120),
        ("99999h", 359_996_400),
    ],
)
def test_a_duration_is_so_many_seconds(text: str, seconds: float) -> None:
    assert Duration(text).seconds == seconds


def test_a_duration_keeps_its_text() -> None:
    assert Duration("90s") == "90s"
    assert str(Duration("1m30s")) == "1m30s"


def test_whole_seconds_are_never_too_few() -> None:
    assert Duration("1001ms").whole_seconds == 2
    assert Duration("2s").whole_seconds == 2


@pytest.mark.parametrize(
    "text", ["", "5", "1.5h", "-1s", "1d", "1 s", "1s1s1s1s1s", "100000s", "1us", "s", "1s\n"]
)
def test_another_form_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration such as 90s"):
        Duration(text)


def test_a_duration_can_be_copied() -> None:
    for copied in (copy.deepcopy(Duration("90s")), pickle.loads(pickle.dumps(Duration("90s")))):
        assert copied.seconds == 90
