"""Names that are taken, and what the API server refuses: words that say whose and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from kvoy_operator.acceptance import name_clash, shadowed
from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.failures import MAX_QUOTED
from kvoy_operator.refusals import recheck_after_s, refusal_by


def _custom(kind: str, created: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "chat", "creationTimestamp": f"2026-11-29T{created}Z"}
    return {"kind": kind, "metadata": metadata, "spec": spec}


def _manifest(kind: str, component: str = "engine") -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": "x", "labels": {"kvoy.dev/component": component}}}


@pytest.mark.parametrize(
    ("service_created", "router_created", "loser"),
    [
        ("10:00:00", "10:00:01", "LLMRouter"),
        ("10:00:01", "10:00:00", "LLMService"),
        ("10:00:00", "10:00:00", "LLMRouter"),
    ],
)
def test_of_a_service_and_a_router_of_one_name_exactly_one_is_refused(
    service_created: str, router_created: str, loser: str
) -> None:
    service = _custom("LLMService", service_created)
    router = _custom("LLMRouter", router_created)
    refused = {
        body["kind"]: refusal
        for body, rival in ((service, router), (router, service))
        if (refusal := shadowed(body, rival))
    }

    assert list(refused) == [loser]
    assert refused[loser].reason == "NameClash"
    assert "metadata.name" in refused[loser].message
    assert "Rename" in refused[loser].message
    assert recheck_after_s(refused[loser]) is not None


def test_a_service_may_have_the_name_of_the_router_that_serves_it() -> None:
    service = _custom("LLMService", "10:00:01", router={"ref": "chat"})
    router = _custom("LLMRouter", "10:00:00")

    assert shadowed(service, router) is None
    assert shadowed(router, service) is None


def test_a_clash_says_whose_the_object_is() -> None:
    owners = [
        {"kind": "Helm", "name": "h"},
        {"kind": "LLMService", "name": "a", "controller": True},
    ]
    owned = {"metadata": {"ownerReferences": owners}}

    assert "belongs to LLMService a;" in name_clash(_manifest("Service"), owned).message
    assert "is not Kvoy's" in name_clash(_manifest("Service"), {"metadata": {}}).message


@pytest.mark.parametrize(
    ("code", "words", "manifest", "remedy"),
    [
        (422, "tolerations[0]: no", _manifest("Deployment"), "podTemplate"),
        (422, "tolerations[0]: no", _manifest("LeaderWorkerSet"), "podTemplate"),
        (422, "tolerations[0]: no", _manifest("Deployment", "router"), "router's resources"),
        (422, "spec.resources: no", _manifest("PersistentVolumeClaim"), "model.cache.pvc"),
        (403, "exceeded quota: tight", _manifest("Service"), "ResourceQuota"),
        (403, "admission webhook w denied it", _manifest("Service"), "policy"),
        (403, 'User "op" cannot patch resource "services"', _manifest("Service"), "chart"),
    ],
)
def test_a_refusal_says_what_to_do(
    code: int, words: str, manifest: dict[str, Any], remedy: str
) -> None:
    refusal = refusal_by(ApiRefusal(code, "", words), manifest)

    assert refusal is not None
    assert words in refusal.message
    assert remedy in refusal.message.partition(words)[2]


def test_a_long_refusal_is_cut_before_what_to_do() -> None:
    refusal = refusal_by(ApiRefusal(422, "Invalid", "no " * 10_000), _manifest("Deployment"))

    assert refusal is not None
    assert len(refusal.message) < MAX_QUOTED + 200
    assert "podTemplate" in refusal.message
