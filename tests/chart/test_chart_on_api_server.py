"""The chart on a real API server: valid objects; install, upgrade, uninstall, a second one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvoy_cluster import build
from kvoy_cluster.api_server import ApiServer, KubectlError
from kvoy_cluster.go_modules import PROMETHEUS_OPERATOR
from kvoy_cluster.helm import CHART, Helm, Manifest, find

pytestmark = pytest.mark.slow

DEFINITION = "customresourcedefinition/llmservices.kvoy.dev"
SERVICE = """
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata: {name: tiny}
spec:
  model: {uri: hf://example/tiny}
  engine: {kind: sim}
"""

COMBINATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one namespace": {"watchNamespaces": ["default"]},
    "without anything optional": {
        "crds": {"install": False},
        "rbac": {"create": False},
        "serviceAccount": {"create": False},
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False, "services": False, "metricsNamespaces": []},
        "dashboards": {"enabled": False},
        "operator": {"replicas": 1},
    },
    "everything set": {
        "image": {"registry": "images.example/ai", "tag": "7", "pullSecrets": ["one", "two"]},
        "serviceAccount": {"name": "mine", "annotations": {"example.com/role": "x"}},
        "networkPolicy": {"metricsNamespaces": ["monitoring", "observability"]},
        "dashboards": {"labels": {"find": "me"}, "annotations": {"folder": "kvoy"}},
        "operator": {
            "replicas": 3,
            "logFormat": "text",
            "extraArgs": ["--resync-s=600"],
            "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
            "priorityClassName": "system-cluster-critical",
            "podAnnotations": {"a": "b"},
            "podLabels": {"team": "ai"},
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "tolerations": [{"key": "x", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}
                        ]
                    }
                }
            },
        },
    },
}

MONITORING = {
    "monitoring": {
        "labels": {"release": "prometheus"},
        "serviceMonitor": {"enabled": True, "interval": "15s"},
        "podMonitors": {"enabled": True, "interval": "15s"},
        "prometheusRule": {"enabled": True},
    }
}


@pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS)
def test_the_api_server_accepts_every_object(
    helm: Helm, bare_server: ApiServer, values: dict[str, Any]
) -> None:
    namespace = bare_server.create_namespace({"pod-security.kubernetes.io/enforce": "restricted"})
    rendered = helm.render(values, namespace=namespace)

    # A pod as its Deployment makes it: only pods meet PodSecurity.
    template = find(rendered, "Deployment", "kvoy-operator")["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": template["metadata"] | {"name": "like-the-operator", "namespace": namespace},
        "spec": template["spec"] | {"serviceAccountName": "default"},
    }
    answer = apply_dry(bare_server, [*rendered, pod])

    assert len(answer.splitlines()) == len(rendered) + 1


def test_the_monitoring_objects_are_what_the_prometheus_operator_defines(
    live_helm: Helm, bare_server: ApiServer
) -> None:
    folder = build.build([PROMETHEUS_OPERATOR]).folders[PROMETHEUS_OPERATOR.name]
    bare_server.install_crds([yaml.safe_load(file.read_text()) for file in folder.glob("*.yaml")])
    namespace = bare_server.create_namespace()

    # Asks the server what it has: nothing of this is rendered for one that lacks the definitions.
    rendered = live_helm.render(MONITORING, "--validate", namespace=namespace)

    monitoring = [each for each in rendered if each["apiVersion"] == "monitoring.coreos.com/v1"]
    answer = apply_dry(bare_server, monitoring)
    assert sorted(each["kind"] for each in monitoring) == [
        *("PodMonitor", "PodMonitor", "PrometheusRule", "ServiceMonitor")
    ]
    assert len(answer.splitlines()) == len(monitoring)
    monitoring[0]["spec"]["intervall"] = "30s"
    with pytest.raises(KubectlError, match="intervall"):
        apply_dry(bare_server, monitoring)


def test_an_upgrade_brings_new_fields_and_an_uninstall_leaves_what_users_made(
    live_helm: Helm, bare_server: ApiServer, tmp_path: Path
) -> None:
    namespace = bare_server.create_namespace()
    release = ("kvoy", "--namespace", namespace)
    kubectl = bare_server.kubectl
    older = older_chart(tmp_path)

    live_helm.run("install", *release[:1], older, *release[1:])
    assert "prefill" not in fields_of_a_service(bare_server)

    live_helm.run("upgrade", *release[:1], CHART, *release[1:])
    assert "prefill" in fields_of_a_service(bare_server)
    kubectl("apply", "-n", namespace, "-f", "-", input=SERVICE)

    live_helm.run("rollback", "kvoy", "1", "--namespace", namespace)
    assert "prefill" not in fields_of_a_service(bare_server)
    live_helm.run("uninstall", *release)

    assert kubectl("get", "llm", "tiny", "-n", namespace, "-o", "name").strip() == (
        "llmservice.kvoy.dev/tiny"
    )
    left = kubectl(
        *("get", "deployments,services,roles,rolebindings,configmaps,networkpolicies", "-A"),
        *("-l", "app.kubernetes.io/instance=kvoy", "-o", "name"),
    )
    assert left == ""

    # Installed again, it takes its definitions back.
    live_helm.run("install", *release[:1], CHART, *release[1:])
    assert "prefill" in fields_of_a_service(bare_server)

    # A second one beside it, for a namespace of its own, touches nothing of the first.
    other = bare_server.create_namespace()
    values = live_helm.write_values({"crds": {"install": False}, "watchNamespaces": [other]})
    live_helm.run("install", "second", CHART, "--namespace", other, "--values", values)
    live_helm.run("uninstall", "second", "--namespace", other)
    live_helm.run("uninstall", *release)
    assert "prefill" in fields_of_a_service(bare_server)


def older_chart(folder: Path) -> Path:
    """The chart as it was before services had a field `prefill`."""
    older = folder / "older"
    shutil.copytree(CHART, older)
    path = older / "definitions" / "llmservices.kvoy.dev.yaml"
    definition = yaml.safe_load(path.read_text())
    (version,) = definition["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["prefill"]
    # Rules may be about the field that is gone.
    spec.pop("x-kubernetes-validations", None)
    version["schema"]["openAPIV3Schema"].pop("x-kubernetes-validations", None)
    version["additionalPrinterColumns"] = []
    path.write_text(yaml.safe_dump(definition))
    return older


def fields_of_a_service(server: ApiServer) -> dict[str, Any]:
    definition = yaml.safe_load(server.kubectl("get", DEFINITION, "-o", "yaml"))
    (version,) = definition["spec"]["versions"]
    properties: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]
    return properties


def apply_dry(server: ApiServer, manifests: list[Manifest]) -> str:
    """What the API server says to all of them, without keeping any."""
    return server.kubectl(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"),
        input=yaml.safe_dump_all(manifests),
    )
