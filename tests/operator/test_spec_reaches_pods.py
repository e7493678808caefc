"""What users say about scheduling and secrets reaches every pod of a service, whatever its role."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvoy_operator.identity import Manifest
from kvoy_operator.manifests import render_shared_router, render_support, render_workload
from kvoy_operator.render_testing import make_options, make_router, make_service
from kvoy_operator.resources import LLMService

Json = dict[str, Any]

PLACEMENT: Json = {
    "nodeSelector": {"pool": "gpu"},
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "tolerations": [{"key": "spot", "operator": "Exists"}],
}
ENGINE_PLACEMENT = {**PLACEMENT, "serviceAccountName": "models"}
SPEC: Json = {
    "model": {"uri": "hf://org/name", "cache": {"pvc": {"size": "1Gi"}}},
    "engine": {"podTemplate": {"spec": ENGINE_PLACEMENT}},
    "imagePullSecrets": [{"name": "registry"}],
    "router": {"podTemplate": {"spec": PLACEMENT}},
    "prefill": {},
}


def pods_of(service: LLMService) -> Iterator[tuple[str, Json]]:
    """Specs of all pods that the operator asks for, by what they are."""
    options = make_options(image_pull_secrets=("operator-registry",))
    for manifest in render_support(service, options):
        if manifest["kind"] in ("Deployment", "Job"):
            yield manifest["kind"], manifest["spec"]["template"]["spec"]
    for pool in service.spec.pools:
        yield from templates_of(pool, render_workload(service, pool, "abc123", options))


def templates_of(pool: str, workload: Manifest) -> Iterator[tuple[str, Json]]:
    if workload["kind"] == "Deployment":
        yield pool, workload["spec"]["template"]["spec"]
        return
    group = workload["spec"]["leaderWorkerTemplate"]
    yield f"{pool} leader", group["leaderTemplate"]["spec"]
    yield f"{pool} worker", group["workerTemplate"]["spec"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_placement_and_pull_secrets_reach_every_pod(nodes: int) -> None:
    service = make_service({**SPEC, "nodes": nodes})

    pods = dict(pods_of(service))

    serving = {"serving"} if nodes == 1 else {"serving leader", "serving worker"}
    assert pods.keys() == {"Deployment", "Job", "prefill"} | serving
    for role, pod in pods.items():
        wanted = PLACEMENT if role == "Deployment" else ENGINE_PLACEMENT
        assert {name: pod.get(name) for name in wanted} == wanted, role
        assert {"name": "registry"} in pod["imagePullSecrets"], role
        assert {"name": "operator-registry"} in pod["imagePullSecrets"], role


def test_they_reach_a_shared_router() -> None:
    router = make_router({"podTemplate": {"spec": PLACEMENT}})

    (pod,) = (
        manifest["spec"]["template"]["spec"]
        for manifest in render_shared_router(router, [], make_options())
        if manifest["kind"] == "Deployment"
    )

    assert {name: pod.get(name) for name in PLACEMENT} == PLACEMENT
