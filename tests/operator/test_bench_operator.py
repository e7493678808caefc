"""The operator's benchmark: its figures are what they say, and a small one meets its goals."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvoy_operator.resources import parse_service
from kvoy_operator_bench.audit import AuditLog, Call, num_writes
from kvoy_operator_bench.bench import Options, run
from kvoy_operator_bench.reconciles import Reconciles
from kvoy_operator_bench.scenario import scenario
from kvoy_operator_bench.settling import is_settled

_OPERATOR = "operator"


def _audited(verb: str, resource: str, user: str = _OPERATOR, code: int = 200) -> bytes:
    event = {
        "kind": "Event",
        "verb": verb,
        "user": {"username": user, "groups": ["system:authenticated"]},
        "objectRef": {"resource": resource, "namespace": "default", "name": "qwen"},
        "responseStatus": {"metadata": {}, "code": code},
    }
    return json.dumps(event).encode() + b"\n"


def test_the_audit_log_is_read_on_from_where_reading_stopped(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    whole, half = _audited("patch", "services"), _audited("create", "events")
    path.write_bytes(whole + half[:20])
    audit = AuditLog(path)

    first = audit.read()
    with path.open("ab") as log:
        log.write(half[20:])
    second = audit.read()

    assert first == Counter({Call(_OPERATOR, "patch", "services", 200): 1})
    assert second == Counter({Call(_OPERATOR, "create", "events", 200): 1})
    assert audit.read() == Counter()


def test_writes_are_counted_for_one_user_and_for_all_and_reads_are_not(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    lines = [
        _audited("list", "pods"),
        _audited("patch", "services"),
        _audited("patch", "services", code=409),
        _audited("update", "deployments/status", user="controllers"),
    ]
    path.write_bytes(b"".join(lines))

    calls = AuditLog(path).read()

    assert num_writes(calls, _OPERATOR) == 2
    assert num_writes(calls) == 3


def test_quantiles_are_those_of_the_time_between_two_scrapes() -> None:
    before = Reconciles(((0.1, 10.0), (1.0, 10.0), (math.inf, 10.0)))
    after = Reconciles(((0.1, 60.0), (1.0, 110.0), (math.inf, 110.0)))

    reconciles = after - before

    assert reconciles.count == 100
    assert reconciles.quantile_s(0.5) == pytest.approx(0.1)
    assert reconciles.quantile_s(0.99) == pytest.approx(0.982)


def test_a_quantile_beyond_the_last_bound_is_that_bound_and_of_nothing_is_none() -> None:
    slow = Reconciles(((1.0, 0.0), (30.0, 0.0), (math.inf, 5.0)))

    assert slow.quantile_s(0.5) == 30.0
    assert math.isnan(Reconciles(((1.0, 0.0), (math.inf, 0.0))).quantile_s(0.5))


def test_the_kinds_of_a_scrape_are_taken_together() -> None:
    name = "kvoy_operator_reconcile_seconds"
    text = f"# TYPE {name} histogram\n" + "".join(
        f'{name}_bucket{{kind="{kind}",le="{le}"}} {count}\n'
        for kind in ("LLMService", "LLMRouter")
        for le, count in (("1.0", 2), ("+Inf", 3))
    )

    assert Reconciles.scraped(text) == Reconciles(((1.0, 4.0), (math.inf, 6.0)))


def test_ten_services_are_six_plain_two_split_and_two_behind_their_namespaces_router() -> None:
    router, *services = scenario(10, ["a"])

    specs = [parse_service(_stored(each.body)).spec for each in services]

    assert router.kind.name == "LLMRouter"
    assert sum(spec.prefill is not None for spec in specs) == 2
    assert [spec.router.ref for spec in specs].count(router.name) == 2


def _stored(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"metadata": body["metadata"] | {"uid": "1", "generation": 1}}


@pytest.mark.parametrize(
    ("ready", "progressing", "observed", "expected"),
    [
        ("True", "False", 2, True),
        ("True", "True", 2, False),
        ("False", "False", 2, False),
        ("True", "False", 1, False),
    ],
)
def test_settled_is_ready_without_progress_in_the_present_generation(
    ready: str, progressing: str, observed: int, expected: bool
) -> None:
    conditions = [
        {"type": kind, "status": status, "observedGeneration": observed}
        for kind, status in (("Ready", ready), ("Progressing", progressing))
    ]

    body = {"metadata": {"generation": 2}, "status": {"conditions": conditions}}

    assert is_settled(body) is expected


@pytest.mark.slow
def test_twenty_services_settle_and_then_nobody_writes_anything(tmp_path: Path) -> None:
    options = Options(
        num_services=20,
        num_namespaces=2,
        num_added=2,
        steady_s=20.0,
        log=tmp_path / "operator.log",
    )

    report = run(options, say=lambda text: None)

    goals = {goal.name: goal for goal in report.goals}
    assert goals["writes of the operator, steady"].is_met
    assert goals["writes of anybody, steady"].is_met
    assert goals["operator's memory, at most"].is_met
    assert report.figures["complaints"] == 0, options.log
    assert report.figures["deleted_s"] > 0
