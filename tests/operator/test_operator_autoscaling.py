"""Real autoscalers on both pools: they read metrics, and their counts are what is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvoy_autoscaled import MetricsApi
from kvoy_cluster.api_server import ApiServer
from kvoy_contract.names import POOL_LABEL
from kvoy_operated import Site
from kvoy_operator.kinds import LLM_SERVICE

pytestmark = pytest.mark.slow

_SAMPLE = Path(__file__).parents[2] / "deploy/samples/08-autoscaling.yaml"
_AT_ONCE = {"scaleDown": {"stabilizationWindowSeconds": 0}}
"""Other than the default, which waits for five minutes before it scales down."""
_WAITING = "kvoy_engine_waiting"
_QUEUE = "queued_prompt_tokens"


@pytest.fixture
def site(api_server: ApiServer, kvoy_crds: None, tmp_path: Path) -> Iterator[Site]:
    site = Site(api_server, tmp_path)
    yield site
    site.close()


@pytest.fixture
def metrics(api_server: ApiServer) -> Iterator[MetricsApi]:
    metrics = MetricsApi(api_server)
    yield metrics
    metrics.close()


def _autoscalers(site: Site) -> str:
    return f"/apis/autoscaling/v2/namespaces/{site.namespace}/horizontalpodautoscalers"


def _scale_by(site: Site, kind: str, name: str, metric: dict[str, Any]) -> None:
    target = {"apiVersion": LLM_SERVICE.api_version, "kind": kind, "name": name}
    spec = {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 8, "metrics": [metric]}
    _apply_autoscaler(site, {"metadata": {"name": name}, "spec": spec})


def _apply_autoscaler(site: Site, body: dict[str, Any]) -> None:
    name = body["metadata"]["name"]
    path = f"{_autoscalers(site)}/{name}"
    kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
    site.server.api.apply(path, {**body, **kind, "spec": {**body["spec"], "behavior": _AT_ONCE}})


def _wait_for_counts(site: Site, name: str, *, serving: int, prefill: int) -> None:
    """What the status wants, what the workloads are told, and which pods there are."""
    wanted = {"serving": serving, "prefill": prefill}

    def are_there() -> bool:
        pools = site.get("LLMService", name)["status"]["pools"]
        workloads = site.all("Deployment", f"kvoy.dev/service={name},kvoy.dev/component=engine")
        pods = [
            pod["metadata"]["labels"][POOL_LABEL]
            for pod in site.all("Pod", f"kvoy.dev/service={name},kvoy.dev/component=engine")
        ]
        return (
            wanted
            == {pool["name"]: pool["desired"] for pool in pools}
            == {
                each["metadata"]["labels"][POOL_LABEL]: each["spec"]["replicas"]
                for each in workloads
            }
            == {pool: pods.count(pool) for pool in wanted}
        )

    try:
        site.wait_until(are_there, f"{wanted} of {name}")
    except TimeoutError as error:
        for autoscaler in site.server.api.get(_autoscalers(site))["items"]:
            error.add_note(str(autoscaler["status"]))
        raise


def _owners(site: Site, name: str) -> dict[str, str]:
    pools = site.get("LLMService", name)["status"]["pools"]
    return {pool["name"]: pool["replicasOwner"] for pool in pools}


def _managers_of_count(site: Site, kind: str, name: str) -> set[str]:
    """Who has written `spec.replicas`."""
    managed = site.get(kind, name)["metadata"]["managedFields"]
    return {
        entry["manager"] for entry in managed if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    }


def test_the_sample_is_scaled_up_and_down_by_its_pods_cpu_use(
    site: Site, metrics: MetricsApi
) -> None:
    service, *autoscalers = yaml.safe_load_all(_SAMPLE.read_text())
    site.start_operator()
    site.start_kubelet()
    metrics.loads[site.namespace, "cpu", "serving"] = 100
    metrics.loads[site.namespace, "cpu", "prefill"] = 100
    site.apply("scaled", **service["spec"])
    for autoscaler in autoscalers:
        _apply_autoscaler(site, autoscaler)
    site.wait_for_condition("scaled", "Ready", "True", "AllReady")

    # Of 500 thousandths that each requests, 70 % may be in use.
    metrics.loads[site.namespace, "cpu", "serving"] = 3 * 350
    _wait_for_counts(site, "scaled", serving=3, prefill=1)
    metrics.loads[site.namespace, "cpu", "prefill"] = 2 * 350
    _wait_for_counts(site, "scaled", serving=3, prefill=2)

    assert _owners(site, "scaled") == {"serving": "LLMService", "prefill": "LLMRoleScaler"}
    assert _managers_of_count(site, "LLMRoleScaler", "scaled-prefill") == {
        "kube-controller-manager"
    }
    metrics.loads[site.namespace, "cpu", "serving"] = 100
    _wait_for_counts(site, "scaled", serving=1, prefill=2)
    metrics.loads[site.namespace, "cpu", "prefill"] = 100
    _wait_for_counts(site, "scaled", serving=1, prefill=1)


def test_engines_own_metrics_scale_and_an_edit_of_the_service_keeps_the_counts(
    site: Site, metrics: MetricsApi
) -> None:
    site.start_operator()
    site.start_kubelet()
    spec: dict[str, Any] = {"engine": {"kind": "sim"}, "prefill": {"replicas": 1}}
    metrics.loads[site.namespace, _WAITING, "serving"] = 16_000
    metrics.loads[site.namespace, _QUEUE, "prefill"] = 40_000_000
    site.apply("qwen", **spec)
    site.wait_for_condition("qwen", "Ready", "True", "AllReady")
    assert _owners(site, "qwen") == {"serving": "LLMService", "prefill": "LLMService"}

    each_pod = {"type": "AverageValue", "averageValue": "4"}
    waiting = {"metric": {"name": _WAITING}, "target": each_pod}
    _scale_by(site, "LLMService", "qwen", {"type": "Pods", "pods": waiting})
    queue = {
        "metric": {"name": _QUEUE, "selector": {"matchLabels": {"pool": "prefill"}}},
        "target": {"type": "AverageValue", "averageValue": "20k"},
    }
    _scale_by(site, "LLMRoleScaler", "qwen-prefill", {"type": "External", "external": queue})

    _wait_for_counts(site, "qwen", serving=4, prefill=2)
    assert _owners(site, "qwen") == {"serving": "LLMService", "prefill": "LLMRoleScaler"}
    before = site.get("LLMService", "qwen")["status"]["revision"]["current"]
    site.apply("qwen", **{**spec, "engine": {"kind": "sim", "args": ["--max-num-seqs=64"]}})
    site.wait_until(
        lambda: site.get("LLMService", "qwen")["status"]["revision"]["current"] != before,
        "another revision",
    )
    _wait_for_counts(site, "qwen", serving=4, prefill=2)
    metrics.loads[site.namespace, _WAITING, "serving"] = 0
    _wait_for_counts(site, "qwen", serving=1, prefill=2)
