"""A model that is downloaded once per cluster: the claim, the Job, and who waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from kvoy_contract.names import SERVING_POOL
from kvoy_operator.identity import Manifest
from kvoy_operator.manifests import is_model_cached, render_support, render_workload
from kvoy_operator.manifests.model_cache import fetch_job_of
from kvoy_operator.observed import ChildKey, Observed
from kvoy_operator.render_testing import make_options, make_service
from kvoy_operator.resources import LLMService

Spec = dict[str, Any]
_HUB = "hf://Qwen/Qwen3-0.6B"


def _cached(model: Spec | None = None, **spec: Any) -> LLMService:
    cache = {"pvc": {"size": "20Gi"}}
    return make_service({"model": {"uri": _HUB, "cache": cache, **(model or {})}, **spec})


def _of_kind(service: LLMService, kind: str) -> list[Manifest]:
    return [m for m in render_support(service, make_options()) if m["kind"] == kind]


def _job(service: LLMService) -> Manifest:
    (job,) = _of_kind(service, "Job")
    return job


def _container(service: LLMService) -> Manifest:
    (container,) = _job(service)["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def _observed(job: str, **conditions: str) -> Observed:
    listed = [{"type": kind, "status": status} for kind, status in conditions.items()]
    return Observed(children={ChildKey("Job", job): {"status": {"conditions": listed}}})


@pytest.mark.parametrize(
    "model",
    [
        {"uri": _HUB},
        {"uri": _HUB, "cache": {"emptyDir": {}}},
        {"uri": _HUB, "cache": {"hostPath": {"path": "/m"}}},
        {"uri": "pvc://models/llama"},
        {"uri": "file:///models/llama"},
    ],
)
def test_only_a_claim_as_cache_is_filled_by_a_job(model: Spec) -> None:
    service = make_service({"model": model})

    assert _of_kind(service, "Job") == []
    assert _of_kind(service, "PersistentVolumeClaim") == []
    assert is_model_cached(service, Observed())


def test_a_simulated_engine_needs_no_download() -> None:
    service = _cached(engine={"kind": "sim"})

    assert _of_kind(service, "Job") == []
    assert is_model_cached(service, Observed())


def test_a_claim_is_made_as_the_spec_says() -> None:
    pvc = {"size": "20Gi", "storageClass": "fast", "accessMode": "ReadWriteOnce"}
    (claim,) = _of_kind(_cached({"cache": {"pvc": pvc}}), "PersistentVolumeClaim")

    assert claim["metadata"]["name"] == "qwen-model-cache"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "20Gi"}},
        "storageClassName": "fast",
    }


def test_a_claim_of_the_user_s_own_is_filled_but_not_made() -> None:
    service = _cached({"cache": {"pvc": {"claimName": "models"}}})
    volumes = _job(service)["spec"]["template"]["spec"]["volumes"]

    assert _of_kind(service, "PersistentVolumeClaim") == []
    assert volumes[0]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": False}


def test_the_job_puts_the_model_where_the_engines_look_for_it() -> None:
    service = _cached()
    workload = render_workload(service, SERVING_POOL, "bcdfg", make_options())
    engine = workload["spec"]["template"]["spec"]["containers"][0]

    assert _container(service)["command"] == ["kvoy", "model", "fetch"]
    assert _container(service)["args"] == [_HUB, f"--to={engine['args'][0]}"]
    mounts = [
        {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}["models"]
        for container in (engine, _container(service))
    ]
    assert mounts[0] == mounts[1]


def test_the_job_has_the_token_the_proxies_and_the_place_of_the_engines() -> None:
    service = _cached(
        {"tokenSecretRef": {"name": "hub"}},
        imagePullSecrets=[{"name": "registry"}],
        engine={
            "image": "example/mine:2",
            "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "podTemplate": {"spec": {"nodeSelector": {"zone": "a"}}},
        },
        podTemplate={"spec": {"tolerations": [{"key": "team", "operator": "Exists"}]}},
    )
    pod = _job(service)["spec"]["template"]["spec"]
    environment = {v["name"]: v for v in _container(service)["env"]}

    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "hub"
    assert environment["HTTPS_PROXY"]["value"] == "http://proxy:3128"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["nodeSelector"] == {"zone": "a"}
    assert pod["tolerations"] == [{"key": "team", "operator": "Exists"}]
    assert _container(service)["image"] == "example/mine:2"


def test_the_job_takes_no_devices_and_none_of_the_engine_s_containers() -> None:
    patch = {
        "containers": [{"name": "engine", "tty": True}, {"name": "helper", "image": "x"}],
        "initContainers": [{"name": "first", "image": "x"}],
    }
    service = _cached(gpus=1, podTemplate={"spec": patch})
    pod = _job(service)["spec"]["template"]["spec"]

    assert [container["name"] for container in pod["containers"]] == ["fetch"]
    assert "initContainers" not in pod
    assert "nvidia.com/gpu" not in str(pod["containers"][0]["resources"])


def test_the_job_tries_on_and_keeps_the_pod_that_says_why() -> None:
    job = _job(_cached())["spec"]

    assert job["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert job["backoffLimit"] >= 1_000_000


@pytest.mark.parametrize(
    "other",
    [
        _cached({"uri": "hf://Qwen/Qwen3-1.7B"}),
        _cached({"revision": "v1"}),
        _cached({"tokenSecretRef": {"name": "hub"}}),
        _cached({"cache": {"pvc": {"claimName": "models"}}}),
        _cached(engine={"env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]}),
        _cached(engine={"image": "example/mine:2"}),
        _cached(podTemplate={"spec": {"nodeSelector": {"zone": "a"}}}),
        _cached(imagePullSecrets=[{"name": "registry"}]),
    ],
)
def test_whatever_changes_the_job_makes_another_one(other: LLMService) -> None:
    assert fetch_job_of(other) != fetch_job_of(_cached())


def test_an_upgrade_of_the_operator_makes_no_other_job() -> None:
    upgraded = make_options(engine_image="localhost/kvoy/engine:2-cpu")
    jobs = [
        manifest
        for options in (make_options(), upgraded)
        for manifest in render_support(_cached(), options)
        if manifest["kind"] == "Job"
    ]

    assert jobs[0]["metadata"]["name"] == jobs[1]["metadata"]["name"]


def test_a_growing_claim_downloads_nothing_again() -> None:
    grown = _cached({"cache": {"pvc": {"size": "40Gi"}}})

    assert fetch_job_of(grown) == fetch_job_of(_cached())


def test_a_model_is_cached_once_its_job_is_complete() -> None:
    service = _cached()
    job = str(fetch_job_of(service))

    assert not is_model_cached(service, Observed())
    assert not is_model_cached(service, _observed(job))
    assert not is_model_cached(service, _observed(job, Failed="True"))
    assert not is_model_cached(service, _observed(job, Complete="False"))
    assert is_model_cached(service, _observed(job, SuccessCriteriaMet="True", Complete="True"))


def test_another_model_s_job_says_nothing_about_this_one() -> None:
    former = str(fetch_job_of(_cached({"revision": "v1"})))

    assert not is_model_cached(_cached(), _observed(former, Complete="True"))
