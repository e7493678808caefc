"""The API server takes every manifest as it is rendered, and PodSecurity takes the pods."""

from __future__ import annotations

from typing import Any

import pytest

from kvoy_cluster.api import APPLY_PATCH, ApiError
from kvoy_cluster.api_server import ApiServer
from kvoy_contract.names import SERVING_POOL
from kvoy_operator.compare import is_applied
from kvoy_operator.identity import Manifest
from kvoy_operator.kinds import POD, kind_of
from kvoy_operator.manifests import render_shared_router, render_support, render_workload
from kvoy_operator.options import RenderOptions
from kvoy_operator.render_testing import LONGEST_NAME, make_options, make_router, make_service
from kvoy_operator.resources import LLMService
from kvoy_operator.revision import revision_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kvoy_crds")]

Spec = dict[str, Any]

_HUB = "hf://Qwen/Qwen3-0.6B"
_SPECS: dict[str, Spec] = {
    "least": {},
    "gpus": {
        "gpus": 2,
        "resources": {"requests": {"cpu": 4, "memory": "24Gi"}, "limits": {"memory": "32768Mi"}},
        "shmSize": "16Gi",
    },
    "other device": {"gpus": 1, "resourceName": "example.com/npu"},
    "claims": {
        "gpus": 1,
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one", "request": "r"}],
    },
    "split": {"engine": {"kind": "sim"}, "prefill": {"replicas": 2}},
    "own claim": {"model": {"uri": _HUB, "cache": {"pvc": {"claimName": "models"}}}},
    "claim to make": {
        "model": {
            "uri": _HUB,
            "tokenSecretRef": {"name": "hub"},
            "cache": {"pvc": {"size": "20Gi", "storageClass": "fast"}},
        }
    },
    "node's folder": {"model": {"uri": _HUB, "cache": {"hostPath": {"path": "/var/models"}}}},
    "pod's folder": {"model": {"uri": _HUB, "cache": {"emptyDir": {"sizeLimit": "9Gi"}}}},
    "folder in a claim": {"model": {"uri": "pvc://models/llama-8b"}},
    "folder in the image": {"model": {"uri": "file:///models/a b"}},
    "environment": {
        "engine": {
            "env": [
                {"name": "A", "value": "1"},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                {"name": "C", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
                {"name": "HF_HOME", "value": "/elsewhere"},
            ]
        }
    },
    "patches": {
        "engine": {"podTemplate": {"spec": {"priorityClassName": "high"}}},
        "podTemplate": {
            "metadata": {"annotations": {"note": "hello"}},
            "spec": {
                "nodeSelector": {"disk": "ssd"},
                "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "helper", "image": "example/helper:1"}],
            },
        },
        "router": {
            "resources": {"limits": {"memory": "1Gi"}},
            "podTemplate": {"spec": {"priorityClassName": "high"}},
        },
    },
    "pull secrets": {"imagePullSecrets": [{"name": "registry"}]},
    "shared router": {"router": {"ref": "shared"}},
}


def _children(service: LLMService, options: RenderOptions) -> list[Manifest]:
    revision = revision_of(service)
    workloads = [render_workload(service, pool, revision, options) for pool in service.spec.pools]
    return [*render_support(service, options), *workloads]


def _dry_run(server: ApiServer, manifest: Manifest) -> Manifest:
    """What would be stored; unknown and doubled fields are errors."""
    metadata = manifest["metadata"]
    path = kind_of(manifest["kind"]).path(metadata["namespace"], metadata["name"])
    query = "fieldManager=kvoy-operator&force=true&dryRun=All&fieldValidation=Strict"
    stored: Manifest = server.api.request("PATCH", f"{path}?{query}", manifest, APPLY_PATCH)
    return stored


@pytest.mark.parametrize("spec", _SPECS.values(), ids=_SPECS.keys())
@pytest.mark.parametrize("name", ["qwen", LONGEST_NAME])
def test_every_child_of_a_service_is_accepted(api_server: ApiServer, name: str, spec: Spec) -> None:
    labels = {"team": "search", "kueue.x-k8s.io/queue-name": "gpus"}
    options = make_options(image_pull_secrets=("mirror",), router_role_kind="Role")
    service = make_service(spec, name=name, labels=labels)

    children = _children(service, options)

    stored = [_dry_run(api_server, child) for child in children]

    # Else the operator would apply it again and again.
    for child, live in zip(children, stored, strict=True):
        assert is_applied(child, live), child["kind"]
    kinds = [manifest["kind"] for manifest in stored]
    assert "Secret" in kinds
    assert "Deployment" in kinds
    assert all(labels.items() <= manifest["metadata"]["labels"].items() for manifest in stored)


def test_every_child_of_a_shared_router_is_accepted(api_server: ApiServer) -> None:
    router = make_router({"replicas": 3, "weights": [{"service": "one", "weight": 10}]})
    services = [make_service(name="one"), make_service(name="two")]

    stored = [
        _dry_run(api_server, child)
        for child in render_shared_router(router, services, make_options())
    ]

    assert {"Deployment", "Service", "PodDisruptionBudget"} <= {m["kind"] for m in stored}


def test_quantities_are_what_the_api_server_reads(api_server: ApiServer) -> None:
    service = make_service(_SPECS["gpus"])
    workload = render_workload(service, SERVING_POOL, "bcdfg", make_options())

    stored = _dry_run(api_server, workload)

    container = stored["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {
        "requests": {"cpu": "4", "memory": "24Gi", "nvidia.com/gpu": "2"},
        "limits": {"memory": "32Gi", "nvidia.com/gpu": "2"},
    }


@pytest.fixture(scope="module")
def restricted_namespace(api_server: ApiServer) -> str:
    """One that refuses every pod which the PodSecurity level `restricted` forbids."""
    namespace = api_server.create_namespace()
    level = "pod-security.kubernetes.io/enforce=restricted"
    api_server.kubectl("label", "namespace", namespace, level)
    api_server.kubectl("create", "serviceaccount", "qwen-router", "-n", namespace)
    return namespace


def _pods_of(service: LLMService) -> list[Manifest]:
    """One pod of every template that the service has."""
    templates = [
        child["spec"]["template"]
        for child in _children(service, make_options())
        if "template" in child.get("spec", {})
    ]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "generateName": "pod-"},
            "spec": template["spec"],
        }
        for template in templates
    ]


def _create_pod(server: ApiServer, namespace: str, pod: Manifest) -> Manifest:
    path = f"{POD.path(namespace)}?dryRun=All&fieldValidation=Strict"
    created: Manifest = server.api.request("POST", path, pod)
    return created


@pytest.mark.parametrize(
    "spec",
    [spec for name, spec in _SPECS.items() if name not in ("node's folder", "patches")],
    ids=[name for name in _SPECS if name not in ("node's folder", "patches")],
)
def test_routers_fetch_jobs_and_engines_run_in_a_restricted_namespace(
    api_server: ApiServer, restricted_namespace: str, spec: Spec
) -> None:
    service = make_service(spec, namespace=restricted_namespace)

    pods = [_create_pod(api_server, restricted_namespace, pod) for pod in _pods_of(service)]

    components = {pod["metadata"]["labels"]["kvoy.dev/component"] for pod in pods}
    assert "engine" in components
    assert ("router" in components) == ("router" not in spec)


def test_only_a_cache_on_the_node_keeps_engines_out_of_a_restricted_namespace(
    api_server: ApiServer, restricted_namespace: str
) -> None:
    service = make_service(_SPECS["node's folder"], namespace=restricted_namespace)
    engine = _pods_of(service)[-1]

    with pytest.raises(ApiError, match="hostPath"):
        _create_pod(api_server, restricted_namespace, engine)
