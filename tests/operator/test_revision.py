"""A revision changes with what the user asks of the engines, and with nothing else."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from kvoy_operator.identity import REVISION_CHARS
from kvoy_operator.render_testing import make_service
from kvoy_operator.revision import POOL_FIELDS, QUANTITY_FIELDS, revision_of
from kvoy_operator.spec import LLMServiceSpec
from kvoy_operator.spec_fields import Quantity, SpecModel
from kvoy_operator.spec_pool import PoolSpec

Spec = dict[str, Any]

# Names of workloads in clusters: an operator of another version must find the same. Never edit one;
# a change here means that every engine of every user is replaced by the next upgrade.
_GOLDEN: tuple[tuple[str, Spec, dict[str, str]], ...] = (
    ("g2z7r", {}, {}),
    ("kjsq2", {"model": {"uri": "pvc://models/llama-8b", "name": "llama"}}, {}),
    ("dptsd", {"model": {"uri": "file:///models/a b"}}, {}),
    ("t7xwj", {"engine": {"kind": "sim"}, "replicas": 3}, {}),
    ("ttjgz", {"gpus": 1, "replicas": 4, "prefill": {"gpus": 1, "replicas": 2}}, {}),
    (
        "s5s2d",
        {"nodes": 2, "gpus": 8, "parallelism": {"tensor": 8, "pipeline": 2}, "topologyKey": "rack"},
        {},
    ),
    ("tfmqq", {"gpus": 1, "resourceName": "example.com/npu", "shmSize": "16Gi"}, {}),
    (
        "s7d2d",
        {"gpus": 1, "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]},
        {},
    ),
    (
        "z8s8k",
        {"resources": {"requests": {"cpu": 2, "memory": "8Gi"}, "limits": {"memory": "16Gi"}}},
        {},
    ),
    (
        "jv4cf",
        {
            "model": {
                "uri": "hf://a/b@v1",
                "tokenSecretRef": {"name": "hub"},
                "cache": {"pvc": {"size": "9Gi"}},
            }
        },
        {},
    ),
    (
        "7mx75",
        {"model": {"uri": "hf://a/b", "revision": "v1", "cache": {"pvc": {"claimName": "models"}}}},
        {},
    ),
    ("94tv4", {"model": {"uri": "hf://a/b", "cache": {"hostPath": {"path": "/var/models"}}}}, {}),
    ("hlghm", {"model": {"uri": "hf://a/b", "cache": {"emptyDir": {"sizeLimit": "20Gi"}}}}, {}),
    (
        "2mbwb",
        {
            "engine": {
                "image": "example/engine:2",
                "imagePullPolicy": "Always",
                "args": ["--max-num-seqs=8"],
            }
        },
        {},
    ),
    (
        "jl9jf",
        {
            "engine": {
                "env": [
                    {"name": "A", "value": "1"},
                    {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                ]
            }
        },
        {},
    ),
    (
        "t2l6v",
        {"engine": {"maxModelLen": 4096, "kvCacheFraction": 0.85, "loadTimeout": "1h30m"}},
        {},
    ),
    (
        "brhz8",
        {
            "podTemplate": {
                "spec": {"nodeSelector": {"disk": "ssd"}, "tolerations": [{"operator": "Exists"}]}
            }
        },
        {},
    ),
    (
        "xwftg",
        {
            "engine": {
                "podTemplate": {
                    "metadata": {"labels": {"a": "b"}},
                    "spec": {
                        "containers": [
                            {"name": "engine", "resources": {"limits": {"cpu": "1500m"}}}
                        ]
                    },
                }
            }
        },
        {},
    ),
    (
        "xgfpx",
        {
            "rollout": {"drainTimeout": "0s", "strategy": "Surge"},
            "imagePullSecrets": [{"name": "r"}],
        },
        {},
    ),
    ("57bhw", {}, {"kvoy.dev/restartedAt": "2026-11-29T10:00:00Z"}),
)


def _resources(**requests: str | int) -> Spec:
    return {"resources": {"requests": requests, "limits": requests}}


def _patch(**spec: Any) -> Spec:
    return {"podTemplate": {"spec": spec}}


def _env(name: str, value: str) -> Spec:
    return {"name": name, "value": value}


@pytest.mark.parametrize(
    ("revision", "spec", "annotations"), _GOLDEN, ids=[golden[0] for golden in _GOLDEN]
)
def test_revisions_never_change_between_versions(
    revision: str, spec: Spec, annotations: dict[str, str]
) -> None:
    assert revision_of(make_service(spec, annotations=annotations)) == revision


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_resources(memory="8Gi"), _resources(memory="8192Mi")),
        (_resources(cpu=1), _resources(cpu="1000m")),
        (_resources(cpu="2", memory="1Gi"), _resources(memory="1024Mi", cpu="2000m")),
        ({"shmSize": "1Gi"}, {"shmSize": "1073741824"}),
        ({"engine": {"loadTimeout": "90s"}}, {"engine": {"loadTimeout": "1m30s"}}),
        ({"rollout": {"drainTimeout": "60s"}}, {"rollout": {"drainTimeout": "1m"}}),
        ({}, {"nodes": 1, "gpus": 0, "engine": {"kind": "native"}, "rollout": {}}),
        ({}, {"resources": {}, "podTemplate": {}, "engine": {"args": [], "env": []}}),
        ({"prefill": {}}, {"prefill": {"nodes": 1, "gpus": 0}}),
        ({}, {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "name": "qwen"}}),
        (
            {"model": {"uri": "hf://a/b@v1"}},
            {"model": {"uri": "hf://a/b", "revision": "v1"}},
        ),
        (
            {"model": {"uri": "hf://a/b", "tokenSecretRef": {"name": "hub"}}},
            {"model": {"uri": "hf://a/b", "tokenSecretRef": {"name": "hub", "key": "token"}}},
        ),
        (
            {"model": {"uri": "hf://a/b", "cache": {"pvc": {"size": "10Gi"}}}},
            {"model": {"uri": "hf://a/b", "cache": {"pvc": {"size": "20Gi"}}}},
        ),
        (
            _patch(nodeSelector={"disk": "ssd", "zone": "a"}),
            _patch(nodeSelector={"zone": "a", "disk": "ssd"}),
        ),
        (
            _patch(volumes=[{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}]),
            _patch(volumes=[{"name": "v", "emptyDir": {"sizeLimit": "1024Mi"}}]),
        ),
        (
            _patch(containers=[{"name": "x", "resources": {"limits": {"cpu": 1}}}]),
            _patch(containers=[{"name": "x", "resources": {"limits": {"cpu": "1"}}}]),
        ),
    ],
)
def test_other_words_for_the_same_engines_are_one_revision(one: Spec, other: Spec) -> None:
    assert revision_of(make_service(one)) == revision_of(make_service(other))


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 7},
        {"prefill": None},
        {"router": {"replicas": 5, "policy": "least-load"}},
        {"router": {"ref": "shared"}},
        {"rollout": {"strategy": "Replace", "maxUnavailable": 3, "surgeTimeout": "9m"}},
        {"rollout": {"progressDeadline": "3h"}},
    ],
)
def test_what_touches_no_engine_makes_no_revision(spec: Spec) -> None:
    assert revision_of(make_service(spec)) == revision_of(make_service())


def test_labels_and_other_annotations_make_no_revision() -> None:
    decorated = make_service(labels={"team": "search"}, annotations={"note": "hello"})

    assert revision_of(decorated) == revision_of(make_service())


def test_a_prefill_pool_s_replicas_make_no_revision() -> None:
    one = make_service({"prefill": {"replicas": 1}})
    other = make_service({"prefill": {"replicas": 9}})

    assert revision_of(one) == revision_of(other)


_CHANGES: tuple[Spec, ...] = (
    {"model": {"uri": "hf://Qwen/Qwen3-1.7B"}},
    {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "name": "other"}},
    {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "revision": "v2"}},
    {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "tokenSecretRef": {"name": "hub"}}},
    {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "cache": {"emptyDir": {}}}},
    {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "cache": {"emptyDir": {"sizeLimit": "9Gi"}}}},
    {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "cache": {"hostPath": {"path": "/m"}}}},
    {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "cache": {"pvc": {"size": "9Gi"}}}},
    {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "cache": {"pvc": {"claimName": "c"}}}},
    {"engine": {"kind": "sim"}},
    {"engine": {"image": "example/engine:2"}},
    {"engine": {"args": ["--max-num-seqs=8"]}},
    {"engine": {"args": ["--block-size=16", "--max-num-seqs=8"]}},
    {"engine": {"args": ["--max-num-seqs=8", "--block-size=16"]}},
    {"engine": {"env": [_env("A", "1")]}},
    {"engine": {"env": [_env("A", "2")]}},
    {"engine": {"maxModelLen": 4096}},
    {"engine": {"kvCacheFraction": 0.8}},
    {"engine": {"loadTimeout": "31m"}},
    {"engine": {"podTemplate": {"spec": {"priorityClassName": "high"}}}},
    {"nodes": 2},
    {"gpus": 1},
    {"gpus": 2},
    {"gpus": 1, "resourceName": "example.com/npu"},
    {"gpus": 1, "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]},
    {"gpus": 2, "nodes": 2, "parallelism": {"tensor": 4, "pipeline": 1}},
    {"nodes": 2, "topologyKey": "rack"},
    {"resources": {"requests": {"cpu": "1"}}},
    {"resources": {"limits": {"cpu": "1"}}},
    {"shmSize": "1Gi"},
    {"prefill": {}},
    {"prefill": {"gpus": 1}},
    {"rollout": {"drainTimeout": "10m"}},
    {"rollout": {"drainTimeout": "0s"}},
    {"imagePullSecrets": [{"name": "registry"}]},
    _patch(nodeSelector={"disk": "ssd"}),
    _patch(nodeSelector={"disk": None}),
    {"podTemplate": {"metadata": {"annotations": {"note": "1"}}}},
    {"podTemplate": {"metadata": {"labels": {"note": "1"}}}},
)


def test_every_change_of_the_engines_is_a_revision_of_its_own() -> None:
    revisions = {revision_of(make_service(spec)) for spec in ({}, *_CHANGES)}

    assert len(revisions) == len(_CHANGES) + 1


def test_a_restart_by_hand_is_a_revision_and_repeating_it_is_another() -> None:
    times = ["2026-11-29T10:00:00Z", "2026-11-29T11:00:00Z"]
    restarted = [
        revision_of(make_service(annotations={"kvoy.dev/restartedAt": time})) for time in times
    ]

    assert len({revision_of(make_service()), *restarted}) == 3


def test_the_default_of_a_served_name_is_the_service_s_own() -> None:
    assert revision_of(make_service(name="one")) != revision_of(make_service(name="two"))


def test_a_revision_has_characters_that_fit_a_name() -> None:
    revision = revision_of(make_service())

    assert len(revision) == REVISION_CHARS
    assert revision.isalnum()
    assert revision.islower()


def test_whoever_adds_a_field_decides_whether_it_makes_a_revision() -> None:
    counted = {*POOL_FIELDS, "model", "engine", "prefill", "image_pull_secrets"}
    left_out = {"replicas", "router"}
    only_drain_timeout = {"rollout"}

    assert set(LLMServiceSpec.model_fields) == counted | left_out | only_drain_timeout


def test_all_quantities_are_compared_by_value() -> None:
    assert {name for name, _ in _quantity_fields(LLMServiceSpec)} <= QUANTITY_FIELDS
    assert {"shmSize", "requests"} <= {name for name, _ in _quantity_fields(PoolSpec)}


def _quantity_fields(model: type[SpecModel]) -> set[tuple[str, str]]:
    """(name in YAML, model) of every quantity, and of every map to quantities, below `model`."""
    found: set[tuple[str, str]] = set()
    hints = typing.get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        if _mentions(hints[name], Quantity):
            found.add((field.alias or name, model.__name__))
        for inner in _models_in(hints[name]):
            found |= _quantity_fields(inner)
    return found


def _mentions(hint: Any, wanted: Any) -> bool:
    return hint == wanted or any(_mentions(part, wanted) for part in typing.get_args(hint))


def _models_in(hint: Any) -> set[type[SpecModel]]:
    if isinstance(hint, type) and issubclass(hint, SpecModel):
        return {hint}
    return {model for part in typing.get_args(hint) for model in _models_in(part)}
