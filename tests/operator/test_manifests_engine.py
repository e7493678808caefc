"""An engine's pod: its command, its model, its devices, its probes, and what a patch may change."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvoy_contract.names import PREFILL_POOL, SERVING_POOL
from kvoy_operator.errors import InvalidSpec
from kvoy_operator.identity import Manifest
from kvoy_operator.manifests import render_workload
from kvoy_operator.manifests.engine_container import PRE_STOP_S
from kvoy_operator.options import RenderOptions
from kvoy_operator.render_testing import make_options, make_service

Spec = dict[str, Any]
_HUB = "hf://Qwen/Qwen3-0.6B"


def _pod(
    spec: Spec | None = None, pool: str = SERVING_POOL, options: RenderOptions | None = None
) -> Manifest:
    workload = render_workload(make_service(spec), pool, "bcdfg", options or make_options())
    pod: Manifest = workload["spec"]["template"]["spec"]
    return pod


def _engine(spec: Spec | None = None, pool: str = SERVING_POOL) -> Manifest:
    return next(c for c in _pod(spec, pool)["containers"] if c["name"] == "engine")


def _environment(container: Manifest) -> dict[str, Any]:
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in container["env"]}


def _volumes(pod: Manifest) -> dict[str, Manifest]:
    return {volume["name"]: volume for volume in pod["volumes"]}


def test_the_command_says_what_to_serve_where_and_under_which_name() -> None:
    engine = _engine()

    assert engine["command"] == ["kvoy", "serve"]
    assert engine["args"] == [
        _HUB,
        "--host=0.0.0.0",
        "--port=8100",
        "--telemetry-port=9100",
        "--served-model-name=qwen",
        "--expect-router",
        "--role=both",
        "--drain-timeout-s=300",
        "--log-format=json",
    ]


@pytest.mark.parametrize(
    ("engine", "argument"),
    [
        ({"kind": "sim"}, "--runner=sim"),
        ({"maxModelLen": 4096}, "--max-model-len=4096"),
        ({"kvCacheFraction": 0.8}, "--gpu-memory-utilization=0.8"),
        ({"args": ["--block-size=32"]}, "--block-size=32"),
    ],
)
def test_each_field_of_the_engine_becomes_its_flag(engine: Spec, argument: str) -> None:
    assert _engine({"engine": engine})["args"][-1] == argument


def test_the_drain_timeout_reaches_the_engine_and_leaves_it_time_to_exit() -> None:
    spec = {"rollout": {"drainTimeout": "1m30s"}}

    assert "--drain-timeout-s=90" in _engine(spec)["args"]
    assert _pod(spec)["terminationGracePeriodSeconds"] > 90 + PRE_STOP_S


def test_with_a_prefill_pool_each_pool_has_its_role() -> None:
    spec: Spec = {"engine": {"kind": "sim"}, "prefill": {}}

    assert "--role=decode" in _engine(spec, SERVING_POOL)["args"]
    assert "--role=prefill" in _engine(spec, PREFILL_POOL)["args"]


@pytest.mark.parametrize(
    ("pool", "arguments"),
    [
        ({"gpus": 1}, []),
        ({"gpus": 4}, ["--tensor-parallel-size=4"]),
        ({"nodes": 2}, ["--pipeline-parallel-size=2"]),
        (
            {"nodes": 2, "gpus": 8},
            ["--tensor-parallel-size=8", "--pipeline-parallel-size=2"],
        ),
        (
            {"nodes": 2, "gpus": 8, "parallelism": {"tensor": 16, "pipeline": 1}},
            ["--tensor-parallel-size=16"],
        ),
    ],
)
def test_a_model_is_cut_over_the_gpus_of_its_nodes(pool: Spec, arguments: list[str]) -> None:
    service = make_service({"engine": {"kind": "sim"}, **pool})
    spec = render_workload(service, SERVING_POOL, "bcdfg", make_options())["spec"]
    template = spec.get("template") or spec["leaderWorkerTemplate"]["leaderTemplate"]

    given = template["spec"]["containers"][0]["args"]

    assert [argument for argument in given if "-parallel-size" in argument] == arguments


@pytest.mark.parametrize(
    ("spec", "image"),
    [
        ({}, "localhost/kvoy/engine:1-cpu"),
        ({"gpus": 1}, "localhost/kvoy/engine:1-cuda"),
        ({"engine": {"kind": "sim"}, "gpus": 1}, "localhost/kvoy/engine:1-sim"),
        ({"engine": {"image": "example/mine:2"}, "gpus": 1}, "example/mine:2"),
    ],
)
def test_the_image_follows_from_kind_and_gpus_unless_given(spec: Spec, image: str) -> None:
    assert _engine(spec)["image"] == image


def test_the_pull_policy_is_the_operator_s_unless_given() -> None:
    assert _engine()["imagePullPolicy"] == "IfNotPresent"
    assert _engine({"engine": {"imagePullPolicy": "Always"}})["imagePullPolicy"] == "Always"


def test_pull_secrets_of_the_operator_and_the_service_are_joined() -> None:
    options = make_options(image_pull_secrets=("mirror", "registry"))

    pod = _pod({"imagePullSecrets": [{"name": "registry"}, {"name": "own"}]}, options=options)

    assert pod["imagePullSecrets"] == [{"name": "mirror"}, {"name": "registry"}, {"name": "own"}]


def test_the_internal_secret_comes_from_a_secret_never_from_the_template() -> None:
    assert _environment(_engine())["KVOY_SECRET"] == {
        "secretKeyRef": {"name": "qwen-internal", "key": "secret"}
    }


def test_a_user_s_variable_replaces_ours_of_the_same_name() -> None:
    env = [{"name": "HF_HOME", "value": "/elsewhere"}, {"name": "A", "value": "1"}]

    names = [variable["name"] for variable in _engine({"engine": {"env": env}})["env"]]

    assert names.count("HF_HOME") == 1
    assert _environment(_engine({"engine": {"env": env}}))["HF_HOME"] == "/elsewhere"
    assert names[-2:] == ["HF_HOME", "A"]


def test_gpus_are_requested_and_limited_alike() -> None:
    resources = _engine({"gpus": 2, "resources": {"requests": {"cpu": 1}}})["resources"]

    assert resources == {
        "requests": {"cpu": "1", "nvidia.com/gpu": "2"},
        "limits": {"nvidia.com/gpu": "2"},
    }


def test_gpus_of_another_device_plugin_are_asked_for_by_its_name() -> None:
    spec = {"gpus": 1, "resourceName": "example.com/npu"}

    assert _engine(spec)["resources"]["limits"] == {"example.com/npu": "1"}
    assert _pod(spec)["tolerations"] == [
        {"key": "example.com/npu", "operator": "Exists", "effect": "NoSchedule"}
    ]


def test_claimed_devices_replace_those_of_a_plugin() -> None:
    claim = {"name": "gpu", "resourceClaimTemplateName": "one", "request": "big"}
    spec = {"gpus": 1, "resourceClaims": [claim]}

    assert _engine(spec)["resources"] == {"claims": [{"name": "gpu", "request": "big"}]}
    assert _pod(spec)["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one"}]


def test_without_gpus_a_pod_tolerates_no_taint() -> None:
    assert "tolerations" not in _pod()


def test_a_patch_that_sets_tolerations_does_not_lose_that_of_the_gpus() -> None:
    mine = {"key": "team", "operator": "Exists"}

    pod = _pod({"gpus": 1, "podTemplate": {"spec": {"tolerations": [mine]}}})

    assert pod["tolerations"] == [
        mine,
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    ]


def test_shared_memory_is_larger_than_the_container_runtime_s() -> None:
    pod = _pod({"shmSize": "16Gi"})

    assert _volumes(pod)["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    mounts = {mount["mountPath"]: mount["name"] for mount in _engine()["volumeMounts"]}
    assert mounts["/dev/shm"] == "shm"


def test_loading_may_take_as_long_as_the_load_timeout_says() -> None:
    probe = _engine({"engine": {"loadTimeout": "45m"}})["startupProbe"]

    assert probe["httpGet"] == {"path": "/started", "port": "http"}
    assert probe["periodSeconds"] * probe["failureThreshold"] == 45 * 60


def test_a_load_timeout_is_never_cut_short() -> None:
    probe = _engine({"engine": {"loadTimeout": "1001ms"}})["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1.001


def test_a_deployment_s_deadline_lies_beyond_the_load_timeout() -> None:
    spec = make_service({"engine": {"loadTimeout": "3h"}})
    workload = render_workload(spec, SERVING_POOL, "bcdfg", make_options())

    assert workload["spec"]["progressDeadlineSeconds"] > 3 * 3600
    assert workload["spec"]["progressDeadlineSeconds"] == math.ceil(spec.spec.progress_deadline_s)


def test_liveness_and_readiness_ask_different_questions() -> None:
    engine = _engine()

    assert engine["livenessProbe"]["httpGet"]["path"] == "/health"
    assert engine["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_why_an_engine_failed_can_be_read_from_its_pod() -> None:
    assert _engine()["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_service_named_kvoy_sets_no_engine_s_flags() -> None:
    assert _pod()["enableServiceLinks"] is False


@pytest.mark.parametrize(
    ("model", "argument"),
    [
        ({"uri": "file:///models/a b"}, "/models/a b"),
        ({"uri": "pvc://models/llama/8b"}, "/models/llama/8b"),
        ({"uri": "pvc://models/llama/"}, "/models/llama"),
        ({"uri": "pvc://models"}, "/models"),
        ({"uri": "hf://org/x@v1"}, "hf://org/x@v1"),
        ({"uri": "hf://org/x", "revision": "v1"}, "hf://org/x@v1"),
    ],
)
def test_the_engine_is_pointed_to_its_model(model: Spec, argument: str) -> None:
    assert _engine({"model": model})["args"][0] == argument


def test_a_model_in_a_claim_is_mounted_read_only() -> None:
    spec = {"model": {"uri": "pvc://models/llama"}}
    volume = _volumes(_pod(spec))["models"]
    mount = next(m for m in _engine(spec)["volumeMounts"] if m["name"] == "models")

    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert mount["readOnly"] is True


def test_a_cached_model_is_read_from_its_claim_and_no_hub_is_asked() -> None:
    cache = {"pvc": {"claimName": "models"}}
    spec = {
        "model": {"uri": _HUB, "cache": cache, "tokenSecretRef": {"name": "hub"}},
    }
    engine = _engine(spec)

    assert engine["args"][0].startswith("/models/Qwen-Qwen3-0.6B-")
    assert _environment(engine)["HF_HUB_OFFLINE"] == "1"
    assert "HF_TOKEN" not in _environment(engine)
    assert _volumes(_pod(spec))["models"]["persistentVolumeClaim"]["readOnly"] is True


def test_models_whose_names_look_alike_have_folders_of_their_own_in_a_claim() -> None:
    cache = {"pvc": {"claimName": "models"}}
    uris = ("hf://a/b.c-d", "hf://a/b.c_d", "hf://a/b.c-d@v1")

    folders = {_engine({"model": {"uri": uri, "cache": cache}})["args"][0] for uri in uris}

    assert len(folders) == len(uris)


def test_a_token_comes_from_the_user_s_secret() -> None:
    spec = {"model": {"uri": _HUB, "tokenSecretRef": {"name": "hub"}}}

    assert _environment(_engine(spec))["HF_TOKEN"] == {
        "secretKeyRef": {"name": "hub", "key": "token"}
    }


@pytest.mark.parametrize(
    ("cache", "home"),
    [
        (None, {}),
        ({"emptyDir": {}}, {}),
        ({"emptyDir": {"sizeLimit": "9Gi"}}, {"sizeLimit": "9Gi"}),
    ],
)
def test_a_downloaded_model_lives_and_goes_with_its_pod(cache: Spec | None, home: Spec) -> None:
    spec = {"model": {"uri": _HUB, **({"cache": cache} if cache else {})}}
    environment = _environment(_engine(spec))
    mount = next(m for m in _engine(spec)["volumeMounts"] if m["name"] == "home")

    assert _volumes(_pod(spec))["home"]["emptyDir"] == home
    assert mount["mountPath"] == environment["KVOY_HOME"]
    assert environment["HF_HOME"].startswith(environment["KVOY_HOME"])


def test_a_node_s_folder_is_shared_by_its_engines_and_made_writable_for_them() -> None:
    spec = {"model": {"uri": _HUB, "cache": {"hostPath": {"path": "/var/m"}}}}
    engine = _engine(spec)
    (init,) = _pod(spec)["initContainers"]

    assert engine["args"][:2] == [_HUB, "--download-dir=/models"]
    assert _volumes(_pod(spec))["models"]["hostPath"] == {
        "path": "/var/m",
        "type": "DirectoryOrCreate",
    }
    assert init["volumeMounts"] == [m for m in engine["volumeMounts"] if m["name"] == "models"]
    assert init["command"] == ["chown", "65532:65532", "/models"]
    assert init["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert "initContainers" not in _pod()


def test_a_simulated_engine_mounts_no_model() -> None:
    spec = {"engine": {"kind": "sim"}, "model": {"uri": "pvc://models/llama"}}

    assert "models" not in _volumes(_pod(spec))
    assert _engine(spec)["args"][0] == "pvc://models/llama"


def test_replicas_are_spread_where_there_is_room() -> None:
    constraints = _pod()["topologySpreadConstraints"]

    assert {c["whenUnsatisfiable"] for c in constraints} == {"ScheduleAnyway"}
    selector = constraints[0]["labelSelector"]["matchLabels"]
    assert selector["kvoy.dev/revision"] == "bcdfg"


def test_the_service_s_patch_comes_before_the_pool_s() -> None:
    patches = {
        "engine": {"podTemplate": {"spec": {"priorityClassName": "a", "schedulerName": "mine"}}},
        "podTemplate": {"spec": {"priorityClassName": "b"}},
    }

    pod = _pod(patches)

    assert (pod["priorityClassName"], pod["schedulerName"]) == ("b", "mine")


def test_a_pool_s_patch_is_its_own() -> None:
    spec = {
        "engine": {"kind": "sim"},
        "prefill": {"podTemplate": {"spec": {"priorityClassName": "b"}}},
    }

    assert "priorityClassName" not in _pod(spec, SERVING_POOL)
    assert _pod(spec, PREFILL_POOL)["priorityClassName"] == "b"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"podTemplate": {}}, "spec.podTemplate"),
        ({"engine": {"podTemplate": {}}}, "spec.engine.podTemplate"),
        ({"prefill": {"podTemplate": {}}}, "spec.prefill.podTemplate"),
    ],
)
def test_a_wrong_patch_is_reported_by_its_own_field(spec: Spec, field: str) -> None:
    wrong = {"spec": {"terminationGracePeriodSeconds": 1}}
    place = next(iter(spec.values()))
    (place if "podTemplate" in place else spec)["podTemplate"] = wrong
    pool = PREFILL_POOL if "prefill" in spec else SERVING_POOL

    with pytest.raises(InvalidSpec) as caught:
        _pod(spec, pool)

    assert caught.value.field.startswith(field)
