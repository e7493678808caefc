"""What no rendered object may have, whatever the spec says."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvoy_operator.identity import Manifest
from kvoy_operator.manifests import (
    render_shared_router,
    render_support,
    render_workload,
)
from kvoy_operator.options import RenderOptions, service_secret
from kvoy_operator.render_testing import make_options, make_router, make_service

Spec = dict[str, Any]
_HUB = "hf://Qwen/Qwen3-0.6B"
_MODELS: tuple[Spec, ...] = (
    {"uri": _HUB},
    {"uri": _HUB, "tokenSecretRef": {"name": "hub"}, "cache": {"pvc": {"size": "9Gi"}}},
    {"uri": _HUB, "cache": {"hostPath": {"path": "/var/m"}}},
    {"uri": "pvc://models/llama"},
    {"uri": "file:///models/llama"},
)
_SHAPES: tuple[Spec, ...] = (
    {},
    {"gpus": 2},
    {"nodes": 2, "gpus": 8, "topologyKey": "rack"},
    {"engine": {"kind": "sim"}, "nodes": 2, "prefill": {"nodes": 2}},
    {"router": {"ref": "shared"}},
)
_SPECS = [{**shape, "model": model} for shape, model in itertools.product(_SHAPES, _MODELS)]


def _children(spec: Spec, options: RenderOptions) -> list[Manifest]:
    service = make_service(spec)
    workloads = [render_workload(service, pool, "bcdfg", options) for pool in service.spec.pools]
    shared = render_shared_router(make_router(), [service], options)
    return [*render_support(service, options), *workloads, *shared]


@pytest.fixture(params=_SPECS, ids=json.dumps)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return _children(request.param, make_options())


def _templates(manifests: list[Manifest]) -> Iterator[Manifest]:
    for manifest in manifests:
        spec = manifest.get("spec", {})
        parts = [spec, spec.get("leaderWorkerTemplate", {})]
        for part, name in itertools.product(
            parts, ("template", "leaderTemplate", "workerTemplate")
        ):
            if name in part:
                yield part[name]


def _containers(template: Manifest) -> Iterator[Manifest]:
    spec = template["spec"]
    yield from spec.get("initContainers", ())
    yield from spec["containers"]


def _component(template: Manifest) -> str:
    return str(template["metadata"]["labels"]["kvoy.dev/component"])


def test_only_routers_hold_a_token(manifests: list[Manifest]) -> None:
    for template in _templates(manifests):
        spec, is_router = template["spec"], _component(template) == "router"
        assert spec["automountServiceAccountToken"] == is_router
        assert ("serviceAccountName" in spec) == is_router
        assert not any("projected" in volume for volume in spec["volumes"])


def test_no_object_grants_a_right_of_its_own_making(manifests: list[Manifest]) -> None:
    kinds = {manifest["kind"] for manifest in manifests}
    bindings = [manifest for manifest in manifests if manifest["kind"] == "RoleBinding"]

    assert kinds.isdisjoint({"Role", "ClusterRole", "ClusterRoleBinding"})
    for binding in bindings:
        assert binding["roleRef"]["name"] == "kvoy-router"
        (subject,) = binding["subjects"]
        assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", "default")
        assert subject["name"].endswith("-router")


def test_every_account_is_without_a_token_unless_its_pod_asks(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] == "ServiceAccount":
            assert manifest["automountServiceAccountToken"] is False


def test_no_pod_shares_anything_of_its_node(manifests: list[Manifest]) -> None:
    for template in _templates(manifests):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & template["spec"].keys()
        for container in _containers(template):
            assert not any("hostPort" in port for port in container.get("ports", ()))


def test_only_a_cache_on_the_node_mounts_a_folder_of_it(manifests: list[Manifest]) -> None:
    for template in _templates(manifests):
        mounted = [volume for volume in template["spec"]["volumes"] if "hostPath" in volume]
        assert all(volume["hostPath"]["path"] == "/var/m" for volume in mounted)
        assert len(mounted) <= 1


def test_no_container_can_become_more_than_it_is(manifests: list[Manifest]) -> None:
    for template in _templates(manifests):
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in _containers(template):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            assert "privileged" not in context
            is_chown = container["name"] == "prepare-cache"
            assert ("add" in context["capabilities"]) == is_chown
            assert ("runAsUser" in context) == is_chown


def test_secrets_stand_in_secrets_alone(manifests: list[Manifest]) -> None:
    secret = service_secret(make_options(), "default", "qwen")
    encoded = base64.b64encode(secret.encode()).decode()

    holders = {m["metadata"]["name"] for m in manifests if encoded in json.dumps(m)}
    assert holders == {"qwen-internal"}
    assert not any(secret in json.dumps(manifest) for manifest in manifests)
    assert all(m["kind"] == "Secret" for m in manifests if m["metadata"]["name"] in holders)


def test_no_pod_reads_variables_of_services_as_its_settings(manifests: list[Manifest]) -> None:
    for template in _templates(manifests):
        assert template["spec"]["enableServiceLinks"] is False


def test_every_object_is_owned_labelled_and_in_its_owner_s_namespace(
    manifests: list[Manifest],
) -> None:
    for manifest in manifests:
        metadata = manifest["metadata"]
        (owner,) = metadata["ownerReferences"]
        assert owner["controller"] is True
        assert metadata["namespace"] == "default"
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "kvoy-operator"


def test_no_two_objects_have_one_name(manifests: list[Manifest]) -> None:
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]

    assert len(set(names)) == len(names)


def test_engines_hear_routers_each_other_and_scrapers_alone() -> None:
    policy = _policy("qwen-engines", make_options())
    scrapers = {"namespaceSelector": {"matchExpressions": [_NAMESPACE]}}

    assert policy["podSelector"]["matchLabels"]["kvoy.dev/component"] == "engine"
    assert [(rule["from"], _numbers(rule)) for rule in policy["ingress"]] == [
        (
            [
                {
                    "podSelector": {
                        "matchLabels": {
                            "app.kubernetes.io/managed-by": "kvoy-operator",
                            "kvoy.dev/component": "router",
                        }
                    }
                }
            ],
            [8100, 9100],
        ),
        ([{"podSelector": policy["podSelector"]}], []),
        ([scrapers], [8100]),
    ]


def test_a_router_s_api_is_open_and_its_admin_port_is_for_scrapers() -> None:
    policy = _policy("qwen-router", make_options())
    api, admin = policy["ingress"]

    assert ("from" in api, _numbers(api)) == (False, [8000])
    assert admin["from"] == [{"namespaceSelector": {"matchExpressions": [_NAMESPACE]}}]
    assert _numbers(admin) == [8001]


def test_without_namespaces_that_scrape_nobody_else_reaches_the_metrics() -> None:
    policy = _policy("qwen-router", make_options(metrics_namespaces=()))

    assert [_numbers(rule) for rule in policy["ingress"]] == [[8000]]


def test_network_policies_can_be_left_to_others() -> None:
    kinds = {m["kind"] for m in _children({}, make_options(has_network_policies=False))}

    assert "NetworkPolicy" not in kinds


_NAMESPACE = {
    "key": "kubernetes.io/metadata.name",
    "operator": "In",
    "values": ["monitoring"],
}


def _policy(name: str, options: RenderOptions) -> Manifest:
    (policy,) = [
        manifest["spec"]
        for manifest in _children({}, options)
        if manifest["kind"] == "NetworkPolicy" and manifest["metadata"]["name"] == name
    ]
    assert isinstance(policy, dict)
    return policy


def _numbers(rule: Manifest) -> list[int]:
    return [port["port"] for port in rule.get("ports", ())]
