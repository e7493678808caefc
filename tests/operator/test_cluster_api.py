"""Creating without touching what is there, on a real API server, for every kind of child."""

from __future__ import annotations

from typing import Any

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_operator.api import Api, load_kubeconfig
from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.cluster import Cluster
from kvoy_operator.identity import Manifest
from kvoy_operator.kinds import LLM_SERVICE, kind_of
from kvoy_operator.manifests import render_support
from kvoy_operator.render_testing import make_options, service_body
from kvoy_operator.resources import parse_service
from kvoy_operator.scaling import FIELD_MANAGER

pytestmark = pytest.mark.slow

_COMMON = {
    "Deployment",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "RoleBinding",
    "Secret",
    "Service",
    "ServiceAccount",
}
_CACHED = {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "cache": {"pvc": {"size": "1Gi"}}}}
_SPLIT = {"engine": {"kind": "sim"}, "prefill": {"replicas": 1}}


@pytest.fixture
def namespace(api_server: ApiServer, kvoy_crds: None) -> str:
    return api_server.create_namespace()


def _children(server: ApiServer, namespace: str, spec: dict[str, Any]) -> list[Manifest]:
    """Of a service that is there, or else they would be garbage."""
    body = service_body(spec, namespace=namespace)
    del body["metadata"]["uid"], body["metadata"]["generation"]
    live = server.api.apply(LLM_SERVICE.path(namespace, "qwen"), body)
    return render_support(parse_service(live), make_options())


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        (_CACHED, _COMMON | {"Job", "PersistentVolumeClaim"}),
        (_SPLIT, _COMMON | {"LLMRoleScaler"}),
    ],
)
async def test_what_is_not_there_is_created_and_what_is_there_is_left_as_it_is(
    api_server: ApiServer, namespace: str, spec: dict[str, Any], kinds: set[str]
) -> None:
    manifests = _children(api_server, namespace, spec)
    api = Api(load_kubeconfig(str(api_server.kubeconfig)))
    cluster = Cluster(api, lambda *_: None, lambda *_: None)

    try:
        for manifest in manifests:
            metadata = manifest["metadata"]
            assert await cluster.create(manifest)
            changed = {**manifest, "metadata": {**metadata, "labels": {"ours": "no"}}}
            assert not await cluster.create(changed)
            path = kind_of(manifest["kind"]).path(namespace, metadata["name"])
            live = api_server.api.get(path)
            assert live["metadata"]["labels"].items() >= metadata["labels"].items()
            assert "ours" not in live["metadata"]["labels"]
            (ours,) = [
                entry
                for entry in live["metadata"]["managedFields"]
                if entry["manager"] == FIELD_MANAGER
            ]
            assert ours["operation"] == "Apply"
    finally:
        await api.close()

    assert {manifest["kind"] for manifest in manifests} == kinds


async def test_a_refused_creation_is_no_conflict(api_server: ApiServer, namespace: str) -> None:
    api = Api(load_kubeconfig(str(api_server.kubeconfig)))
    cluster = Cluster(api, lambda *_: None, lambda *_: None)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "bad", "namespace": namespace},
        "spec": {"ports": [{"port": 70_000}]},
    }

    try:
        with pytest.raises(ApiRefusal) as caught:
            await cluster.create(service)
    finally:
        await api.close()

    assert caught.value.is_invalid
