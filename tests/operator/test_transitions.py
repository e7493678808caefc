from __future__ import annotations

from typing import Any

import pytest

from kvoy_operator.transitions import MAX_NOTE, transitions


def _conditions(**statuses: tuple[str, str]) -> list[dict[str, Any]]:
    """By type: status and reason."""
    return [
        {"type": name, "status": status, "reason": reason, "message": f"{name} {reason}"}
        for name, (status, reason) in statuses.items()
    ]


START = _conditions(
    Accepted=("True", "Accepted"),
    Ready=("False", "Loading"),
    Progressing=("True", "Deploying"),
    Degraded=("False", "AsExpected"),
    RouterReady=("False", "RouterStarting"),
)
SERVING = _conditions(
    Accepted=("True", "Accepted"),
    Ready=("True", "AllReady"),
    Progressing=("False", "Settled"),
    Degraded=("False", "AsExpected"),
    RouterReady=("True", "RouterAvailable"),
)


def _told(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each.type, each.reason) for each in transitions(before, after)]


def test_a_new_service_tells_only_that_it_is_being_deployed() -> None:
    assert _told([], START) == [("Normal", "Deploying")]


def test_the_way_to_ready_is_told_once() -> None:
    assert _told(START, SERVING) == [
        ("Normal", "Ready"),
        ("Normal", "Settled"),
        ("Normal", "RouterReady"),
    ]
    assert _told(SERVING, SERVING) == []


def test_a_message_that_changes_alone_is_not_told() -> None:
    changed = [{**each, "message": "other numbers"} for each in SERVING]

    assert _told(SERVING, changed) == []


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (_conditions(Ready=("False", "CrashLoop")), ("Warning", "NotReady")),
        (_conditions(Degraded=("True", "CrashLoop")), ("Warning", "CrashLoop")),
        (_conditions(Accepted=("False", "LWSNotInstalled")), ("Warning", "LWSNotInstalled")),
        (_conditions(Progressing=("True", "OutageAhead")), ("Warning", "OutageAhead")),
        (
            _conditions(Progressing=("False", "ProgressDeadlineExceeded")),
            ("Warning", "ProgressDeadlineExceeded"),
        ),
        (_conditions(Progressing=("True", "RollingOut")), ("Normal", "RollingOut")),
        (_conditions(RouterReady=("False", "RouterStarting")), ("Warning", "RouterNotReady")),
    ],
)
def test_what_gets_worse_is_a_warning(
    after: list[dict[str, Any]], expected: tuple[str, str]
) -> None:
    assert _told(SERVING, after) == [expected]


def test_another_failure_after_the_first_is_told_and_so_is_recovery() -> None:
    crash = _conditions(Degraded=("True", "CrashLoop"))
    pull = _conditions(Degraded=("True", "ImagePull"))

    assert _told(crash, pull) == [("Warning", "ImagePull")]
    assert _told(pull, pull) == []
    assert _told(pull, _conditions(Degraded=("False", "AsExpected"))) == [("Normal", "Recovered")]


def test_a_refusal_is_told_once_and_not_again_as_a_phase() -> None:
    refused = _conditions(Accepted=("False", "InvalidSpec"), Progressing=("False", "InvalidSpec"))

    assert _told([], refused) == [("Warning", "InvalidSpec")]
    assert _told(refused, refused) == []


def test_a_note_fits_into_an_event() -> None:
    condition = {"type": "Degraded", "status": "True", "reason": "CrashLoop", "message": "x" * 5000}

    (told,) = transitions([], [condition])

    assert len(told.message) == MAX_NOTE
