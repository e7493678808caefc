"""What the API server makes of our manifests counts as applied; any change of ours does not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from kvoy_cluster.api import APPLY_PATCH
from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.control_plane import ControlPlane
from kvoy_operator.compare import is_applied, stamped
from kvoy_operator.identity import Manifest
from kvoy_operator.kinds import kind_of
from kvoy_operator.manifests import render_shared_router, render_support, render_workload
from kvoy_operator.render_testing import make_options, make_router, make_service
from kvoy_operator.resources import LLMService
from kvoy_operator.revision import revision_of

pytestmark = pytest.mark.slow

_HUB = "hf://Qwen/Qwen3-0.6B"
_SPECS: dict[str, dict[str, Any]] = {
    "gpus and quantities": {
        "gpus": 1,
        "resources": {
            "requests": {"cpu": "4000m", "memory": "24Gi"},
            "limits": {"memory": "32768Mi"},
        },
        "shmSize": "16384Mi",
    },
    "claims": {
        "gpus": 1,
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one", "request": "r"}],
    },
    "split": {"engine": {"kind": "sim"}, "prefill": {"replicas": 2}},
    "claim to make": {
        "model": {
            "uri": _HUB,
            "tokenSecretRef": {"name": "hub"},
            "cache": {"pvc": {"size": "20480Mi", "storageClass": "fast"}},
        }
    },
    "node's folder": {"model": {"uri": _HUB, "cache": {"hostPath": {"path": "/var/models"}}}},
    "environment and patches": {
        "engine": {
            "env": [
                {"name": "A", "value": "1"},
                {"name": "EMPTY", "value": ""},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                {"name": "C", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
            ]
        },
        "podTemplate": {
            "spec": {
                "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "helper", "image": "example/helper:1"}],
            },
        },
    },
}


def _children(service: LLMService) -> list[Manifest]:
    revision = revision_of(service)
    options = make_options(image_pull_secrets=("mirror",))
    workloads = [render_workload(service, pool, revision, options) for pool in service.spec.pools]
    return [*render_support(service, options), *workloads]


def _stored(server: ApiServer, manifest: Manifest, dry_run: str = "&dryRun=All") -> Manifest:
    metadata = manifest["metadata"]
    path = kind_of(manifest["kind"]).path(metadata["namespace"], metadata["name"])
    query = f"fieldManager=kvoy-operator&force=true{dry_run}"
    stored: Manifest = server.api.request("PATCH", f"{path}?{query}", manifest, APPLY_PATCH)
    return stored


@pytest.mark.usefixtures("kvoy_crds")
@pytest.mark.parametrize("spec", _SPECS.values(), ids=_SPECS.keys())
def test_what_the_server_stores_of_a_child_is_applied(
    api_server: ApiServer, spec: dict[str, Any]
) -> None:
    for child in _children(make_service(spec)):
        manifest = stamped(child)

        assert is_applied(manifest, _stored(api_server, manifest)), manifest["kind"]


@pytest.mark.usefixtures("kvoy_crds")
def test_what_the_server_stores_of_a_shared_router_is_applied(api_server: ApiServer) -> None:
    services = [make_service(name="one"), make_service(name="two")]

    for child in render_shared_router(make_router({"replicas": 3}), services, make_options()):
        manifest = stamped(child)

        assert is_applied(manifest, _stored(api_server, manifest)), manifest["kind"]


@pytest.mark.usefixtures("kvoy_crds")
@pytest.mark.parametrize("spec", _SPECS.values(), ids=_SPECS.keys())
def test_every_changed_field_is_seen(api_server: ApiServer, spec: dict[str, Any]) -> None:
    for child in _children(make_service(spec)):
        live = _stored(api_server, child)

        for path, changed in _each_leaf_changed(child):
            assert not is_applied(changed, live), (child["kind"], path)


def test_a_stored_group_workload_is_applied_with_what_its_webhook_adds(
    control_plane: ControlPlane,
) -> None:
    namespace = control_plane.create_namespace()
    spec = {"nodes": 2, "engine": {"kind": "sim"}, "topologyKey": "example.com/rack"}
    service = make_service(spec, namespace=namespace)
    manifest = stamped(render_workload(service, "serving", "bcdfgh", make_options()))

    live = _stored(control_plane, manifest, dry_run="")

    assert live["spec"]["leaderWorkerTemplate"]["restartPolicy"]
    assert is_applied(manifest, live)
    manifest["spec"]["leaderWorkerTemplate"]["size"] = 3
    assert not is_applied(manifest, live)


def _each_leaf_changed(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Copies with one value changed, apart from what says which object it is."""
    for path in _leaves(manifest, ()):
        if path[0] in ("apiVersion", "kind"):
            continue
        changed = copy.deepcopy(manifest)
        place: Any = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = _other(place[path[-1]])
        yield ".".join(map(str, path)), changed


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list) and item:
            yield from _leaves(item, (*path, key))
        elif not isinstance(item, dict | list):
            yield (*path, key)


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str() if value[:1].isdigit():
            return f"9{value}"
        case _:
            return f"{value}x"
