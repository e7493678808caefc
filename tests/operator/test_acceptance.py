from __future__ import annotations

from typing import Any

import pytest

from kvoy_operator.acceptance import Refusal, invalid, refusal_of
from kvoy_operator.errors import InvalidSpec
from kvoy_operator.render_testing import make_service

SIM = {"kind": "sim"}


def _refusal(spec: dict[str, Any], *, has_lws: bool = True) -> Refusal | None:
    return refusal_of(make_service(spec), has_lws=has_lws, router_names=["shared"])


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"prefill": {}}, "spec.prefill"),
        ({"nodes": 2}, "spec.nodes"),
        ({"gpus": 4}, "spec.gpus"),
        ({"gpus": 4, "parallelism": {"tensor": 4}}, "spec.parallelism"),
    ],
)
def test_what_the_native_engine_cannot_do_is_refused_by_field(
    spec: dict[str, Any], field: str
) -> None:
    refusal = _refusal(spec)

    assert refusal is not None
    assert refusal.reason == "UnsupportedByEngine"
    assert refusal.message.startswith(f"{field}: ")
    assert "engine.kind: sim" in refusal.message
    assert "only simulates" in refusal.message


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"gpus": 1},
        {"engine": SIM, "prefill": {}},
        {"engine": SIM, "nodes": 2},
        {"router": {"ref": "shared"}},
    ],
)
def test_what_works_is_accepted(spec: dict[str, Any]) -> None:
    assert _refusal(spec) is None


def test_groups_need_leader_worker_sets_and_nothing_else_does() -> None:
    serving = _refusal({"engine": SIM, "nodes": 2}, has_lws=False)
    prefill = _refusal({"engine": SIM, "prefill": {"nodes": 2}}, has_lws=False)

    assert serving is not None
    assert prefill is not None
    assert serving.reason == prefill.reason == "LWSNotInstalled"
    assert serving.message.startswith("spec.nodes: ")
    assert prefill.message.startswith("spec.prefill.nodes: ")
    assert _refusal({"engine": SIM}, has_lws=False) is None


def test_a_router_that_is_not_there_is_named() -> None:
    refusal = _refusal({"router": {"ref": "other"}})

    assert refusal is not None
    assert refusal.reason == "RouterNotFound"
    assert "LLMRouter other" in refusal.message


def test_an_invalid_spec_names_its_field() -> None:
    assert invalid(InvalidSpec("spec.a", "is wrong")) == Refusal("InvalidSpec", "spec.a: is wrong")
