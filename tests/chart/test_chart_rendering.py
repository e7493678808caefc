"""What helm makes of the chart: rights, flags, monitors, dashboards, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from kvoy_cluster.helm import CHART, Helm, HelmError, Manifest, find
from kvoy_contract.names import (
    COMPONENT_LABEL,
    ENGINE_COMPONENT,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROUTER_COMPONENT,
)
from kvoy_contract.settings import read_settings
from kvoy_operator.config import OperatorConfig
from kvoy_operator.rbac import Rule, own_rules, router_rules, service_rules

pytestmark = pytest.mark.slow

MONITORS = ("PodMonitor", "PrometheusRule", "ServiceMonitor")
WITH_MONITORS = tuple(f"--api-versions=monitoring.coreos.com/v1/{kind}" for kind in MONITORS)
OPERATOR = "kvoy-operator"


def test_helm_finds_nothing_to_complain_about(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm.run("lint", "--strict", CHART)


def test_the_operator_s_rights_are_those_that_its_code_names(helm: Helm) -> None:
    rendered = helm.render()

    assert rules(find(rendered, "ClusterRole", OPERATOR)) == as_rules(
        service_rules("ClusterRole", "kvoy-router")
    )
    assert rules(find(rendered, "ClusterRole", "kvoy-router")) == as_rules(router_rules())
    assert rules(find(rendered, "Role", f"{OPERATOR}-own")) == as_rules(
        own_rules(OPERATOR, f"{OPERATOR}-master")
    )


def test_with_namespaces_there_are_roles_in_these_and_nothing_of_the_whole_cluster(
    helm: Helm,
) -> None:
    rendered = helm.render({"watchNamespaces": ["a", "b"]})

    assert not [m for m in rendered if m["kind"].startswith("Cluster")]
    for namespace in ("a", "b"):
        there = [m for m in rendered if m["metadata"].get("namespace") == namespace]
        assert rules(find(there, "Role", OPERATOR)) == as_rules(
            service_rules("Role", "kvoy-router")
        )
        assert rules(find(there, "Role", "kvoy-router")) == as_rules(router_rules())
        subject = find(there, "RoleBinding", OPERATOR)["subjects"][0]
        assert subject == {
            "kind": "ServiceAccount",
            "name": OPERATOR,
            "namespace": "kvoy-system",
        }


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["a"]}])
def test_no_role_has_a_wildcard(helm: Helm, values: dict[str, Any]) -> None:
    roles = [m for m in helm.render(values) if m["kind"] in ("Role", "ClusterRole")]

    assert roles
    assert "*" not in json.dumps([role["rules"] for role in roles])


def test_without_rbac_nobody_gets_rights(helm: Helm) -> None:
    rendered = helm.render({"rbac": {"create": False}})

    assert not [m for m in rendered if "Role" in m["kind"] and "definition" not in m["kind"]]


def test_the_operator_understands_the_flags_that_the_chart_gives_it(helm: Helm) -> None:
    config = operator_config(helm.render())

    assert config.namespace == ()
    assert config.own_namespace == "kvoy-system"
    assert config.router_image == "localhost/kvoy/router:0.1.0"
    assert config.engine_image == "localhost/kvoy/engine:0.1.0-cpu"
    assert config.engine_cuda_image == "localhost/kvoy/engine:0.1.0-cuda"
    assert config.sim_image == "localhost/kvoy/engine:0.1.0-sim"
    assert config.metrics_ns == ("monitoring",)
    assert config.network_policies
    assert (config.router_role_kind, config.router_role_name) == ("ClusterRole", "kvoy-router")


def test_values_reach_the_operator(helm: Helm) -> None:
    config = operator_config(
        helm.render(
            {
                "image": {
                    "registry": "images.example/ai",
                    "tag": "7",
                    "pullPolicy": "Always",
                    "pullSecrets": ["one", "two"],
                },
                "images": {"engineCuda": "other.example/engine@sha256:12"},
                "watchNamespaces": ["a", "b"],
                "networkPolicy": {"services": False, "metricsNamespaces": []},
                "operator": {"workers": 3, "extraArgs": ["--log-level=debug"]},
                "routers": {
                    "flowControl": {"maxWaiting": 1000000, "objectives": {'a: "b" #c': -5}},
                    "timeouts": {"request": "20m"},
                },
            }
        )
    )

    assert config.namespace == ("a", "b")
    assert config.engine_image == "images.example/ai/engine:7-cpu"
    assert config.engine_cuda_image == "other.example/engine@sha256:12"
    assert config.image_pull_policy == "Always"
    assert config.image_pull_secret == ("one", "two")
    assert config.router_role_kind == "Role"
    assert not config.network_policies
    assert config.metrics_ns == ()
    assert (config.workers, config.log_level) == (3, "debug")
    routers = config.router_behavior
    assert routers.flow_control.max_waiting == 1_000_000
    assert routers.flow_control.objectives == {'a: "b" #c': -5}
    assert routers.timeouts.request == "20m"


def test_another_release_name_gives_other_names_everywhere(helm: Helm) -> None:
    rendered = helm.render({"crds": {"install": False}}, release="second")

    assert all(m["metadata"]["name"].startswith("second-kvoy") for m in rendered)


def test_definitions_can_be_left_out_and_are_kept_otherwise(helm: Helm) -> None:
    definitions = definitions_of(helm.render())

    assert len(definitions) == 3
    for definition in definitions:
        packed = yaml.safe_load(
            (CHART / "definitions" / f"{definition['metadata']['name']}.yaml").read_text()
        )
        assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert definition["spec"] == packed["spec"]
    assert not definitions_of(helm.render({"crds": {"install": False}}))


def test_monitors_need_a_cluster_that_knows_them(helm: Helm) -> None:
    without = {m["kind"] for m in helm.render()}
    with_them = {m["kind"] for m in helm.render({}, *WITH_MONITORS)}
    switched_off = {
        "monitoring": {
            "podMonitors": {"enabled": False},
            "serviceMonitor": {"enabled": False},
            "prometheusRule": {"enabled": False},
        }
    }

    assert not without & set(MONITORS)
    assert with_them >= set(MONITORS)
    assert not {m["kind"] for m in helm.render(switched_off, *WITH_MONITORS)} & set(MONITORS)


@pytest.mark.parametrize("component", [ENGINE_COMPONENT, ROUTER_COMPONENT])
def test_monitors_select_what_the_operator_makes(helm: Helm, component: str) -> None:
    rendered = helm.render({"monitoring": {"labels": {"release": "stack"}}}, *WITH_MONITORS)

    monitor = find(rendered, "PodMonitor", f"kvoy-{component}s")

    assert monitor["metadata"]["labels"]["release"] == "stack"
    assert monitor["spec"]["selector"]["matchLabels"] == {
        MANAGED_BY_LABEL: MANAGED_BY,
        COMPONENT_LABEL: component,
    }
    assert monitor["spec"]["namespaceSelector"] == {"any": True}


def test_alerts_and_dashboards_are_packed_as_they_are(helm: Helm) -> None:
    rendered = helm.render({}, *WITH_MONITORS)

    alerts = yaml.safe_load((CHART / "rules" / "kvoy.yaml").read_text())
    assert find(rendered, "PrometheusRule", "kvoy-kvoy")["spec"] == alerts
    files = list((CHART / "dashboards").glob("*.json"))
    assert files
    for file in files:
        packed = find(rendered, "ConfigMap", f"kvoy-dashboard-{file.stem}")
        assert packed["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(packed["data"][file.name]) == json.loads(file.read_text())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicas": 3}, "replicas"),
        ({"operator": {"replica": 3}}, "replica"),
        ({"operator": {"replicas": "two"}}, "/operator/replicas"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"watchNamespaces": ["Not_A_Name"]}, "/watchNamespaces/0"),
        ({"monitoring": {"podMonitors": {"interval": "often"}}}, "/monitoring/podMonitors"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(
    helm: Helm, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(HelmError, match=named):
        helm.render(values)


def as_rules(rules: list[Rule]) -> list[str]:
    return canonical([rule.manifest() for rule in rules])


def rules(role: Manifest) -> list[str]:
    return canonical(role["rules"])


def canonical(rules: list[dict[str, Any]]) -> list[str]:
    """Equal for equal rights: order has no meaning."""
    return sorted(
        json.dumps({key: sorted(values) for key, values in sorted(rule.items())}) for rule in rules
    )


def operator_config(rendered: list[Manifest]) -> OperatorConfig:
    pod = find(rendered, "Deployment", OPERATOR)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["kvoy", "operator"]
    return read_settings(OperatorConfig, "kvoy operator", "", container["args"])


def definitions_of(rendered: list[Manifest]) -> list[Manifest]:
    return [m for m in rendered if m["kind"] == "CustomResourceDefinition"]
