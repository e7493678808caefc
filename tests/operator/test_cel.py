"""Every rule between fields: the API server and the operator refuse the same, in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from kvoy_cluster.api import ApiError
from kvoy_cluster.api_server import ApiServer
from kvoy_operator.crd import DEFINITIONS, render_crd
from kvoy_operator.errors import InvalidSpec
from kvoy_operator.resources import parse_router, parse_scaler, parse_service

Spec = dict[str, Any]

PLURALS = {definition.kind: definition.plural for definition in DEFINITIONS}
PARSERS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "LLMService": parse_service,
    "LLMRouter": parse_router,
    "LLMRoleScaler": parse_scaler,
}
HUB = {"uri": "hf://org/name"}
CLAIM = {"uri": "pvc://models/name"}


class Case(NamedTuple):
    field: str
    """Where the API server points, below the object."""
    message: str
    """How the message begins."""
    spec: Spec
    kind: str = "LLMService"
    name: str = "qwen"


def service(**fields: Any) -> Spec:
    return {"model": HUB, **fields}


def model(**fields: Any) -> Spec:
    return {"model": {**HUB, **fields}}


def pvc(**fields: Any) -> Spec:
    return model(cache={"pvc": fields})


def engine(**fields: Any) -> Spec:
    return service(engine=fields)


REFUSED = [
    Case("metadata", "metadata.name: at most 40", service(), name="a" * 41),
    Case("metadata", "metadata.name: lower-case", service(), name="3models"),
    Case("metadata", "metadata.name: lower-case", service(), name="a.b"),
    Case("metadata", "metadata.name: at most 40", {}, "LLMRouter", "a" * 41),
    Case("metadata", "metadata.name: lower-case", {}, "LLMRouter", "a.b"),
    # The model.
    Case("spec.model.uri", "model.uri: must begin with", {"model": {"uri": "s3://bucket/x"}}),
    Case("spec.model.uri", "model.uri: must begin with", {"model": {"uri": "Qwen/Qwen3-8B"}}),
    Case("spec.model.uri", "model.uri: must begin with", {"model": {"uri": "HF://org/name"}}),
    Case("spec.model.uri", "model.uri: a model on Hugging", {"model": {"uri": "hf://name"}}),
    Case("spec.model.uri", "model.uri: a model on Hugging", {"model": {"uri": "hf://a/b/c"}}),
    Case("spec.model.uri", "model.uri: a model on Hugging", {"model": {"uri": "hf://a/b@"}}),
    Case("spec.model.uri", "model.uri: a model on Hugging", {"model": {"uri": "hf://a/b c"}}),
    Case("spec.model.uri", "model.uri: a model in a Pers", {"model": {"uri": "pvc:///models/x"}}),
    Case("spec.model.uri", "model.uri: a model in a Pers", {"model": {"uri": "pvc://Models/x"}}),
    Case("spec.model.uri", "model.uri: a model in a Pers", {"model": {"uri": "pvc://models//x"}}),
    Case("spec.model.uri", "model.uri: a folder in the", {"model": {"uri": "file://models/x"}}),
    Case("spec.model.uri", "model.uri: the folder must", {"model": {"uri": "pvc://models/../x"}}),
    Case("spec.model.uri", "model.uri: the folder must", {"model": {"uri": "file:///models/.."}}),
    Case("spec.model.revision", "model.revision: only", {"model": {**CLAIM, "revision": "main"}}),
    Case(
        "spec.model.revision",
        "model.revision: model.uri names",
        {"model": {"uri": "hf://org/name@main", "revision": "main"}},
    ),
    Case(
        "spec.model.tokenSecretRef",
        "model.tokenSecretRef: only",
        {"model": {**CLAIM, "tokenSecretRef": {"name": "hub"}}},
    ),
    Case(
        "spec.model.cache",
        "model.cache: only",
        {"model": {**CLAIM, "cache": {"emptyDir": {}}}},
    ),
    Case("spec.model.cache", "model.cache: exactly one", model(cache={})),
    Case(
        "spec.model.cache",
        "model.cache: exactly one",
        model(cache={"emptyDir": {}, "hostPath": {"path": "/models"}}),
    ),
    Case("spec.model.cache.pvc", "model.cache.pvc: give either", pvc()),
    Case(
        "spec.model.cache.pvc", "model.cache.pvc: give either", pvc(claimName="models", size="1Gi")
    ),
    Case(
        "spec.model.cache.pvc",
        "model.cache.pvc: storageClass and accessMode",
        pvc(claimName="models", storageClass="fast"),
    ),
    Case(
        "spec.model.cache.pvc",
        "model.cache.pvc: storageClass and accessMode",
        pvc(claimName="models", accessMode="ReadWriteMany"),
    ),
    # The engine.
    Case("spec.engine.args", "engine.args: the operator sets", engine(args=["--port=1"])),
    Case("spec.engine.args", "engine.args: the operator sets", engine(args=["--seed=1", "--role"])),
    Case("spec.engine.args", "engine.args: set engine.max", engine(args=["--max-model-len", "8"])),
    Case("spec.engine.kvCacheFraction", "engine.kvCacheFraction", engine(kvCacheFraction=0)),
    Case("spec.engine.kvCacheFraction", "engine.kvCacheFraction", engine(kvCacheFraction=0.001)),
    Case("spec.engine.loadTimeout", "loadTimeout: must be", engine(loadTimeout="0s")),
    Case("spec.engine.loadTimeout", "loadTimeout: must be", engine(loadTimeout="25h")),
    Case(
        "spec.engine.env[0].name",
        "engine.env: the operator sets KVOY_SECRET",
        engine(env=[{"name": "KVOY_SECRET", "value": "x"}]),
    ),
    Case(
        "spec.engine.env[0].name",
        "engine.env: the operator sets KVOY_SECRET",
        engine(env=[{"name": "LWS_GROUP_SIZE", "value": "2"}]),
    ),
    Case(
        "spec.engine.env[0]",
        "engine.env: give either value",
        engine(
            env=[
                {
                    "name": "A",
                    "value": "x",
                    "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
                }
            ]
        ),
    ),
    Case(
        "spec.engine.env[0].valueFrom",
        "engine.env: valueFrom needs",
        engine(env=[{"name": "A", "valueFrom": {}}]),
    ),
    # Pools.
    Case("spec.parallelism", "parallelism: tensor", service(parallelism={"tensor": 2})),
    Case("spec.parallelism", "parallelism: tensor", service(gpus=4, parallelism={"tensor": 2})),
    Case(
        "spec.parallelism",
        "parallelism: tensor",
        service(nodes=2, gpus=8, parallelism={"tensor": 8}),
    ),
    Case(
        "spec.prefill.parallelism",
        "parallelism: tensor",
        service(prefill={"nodes": 2, "parallelism": {"pipeline": 3}}),
    ),
    Case(
        "spec.resourceName",
        "resourceName: GPUs come either",
        service(
            gpus=1,
            resourceName="amd.com/gpu",
            resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
        ),
    ),
    Case("spec.resourceName", "resourceName: says what", service(resourceName="amd.com/gpu")),
    Case("spec.resourceClaims[0]", "resourceClaims: each", service(resourceClaims=[{"name": "x"}])),
    Case(
        "spec.resourceClaims[0]",
        "resourceClaims: each",
        service(
            resourceClaims=[
                {"name": "x", "resourceClaimName": "x", "resourceClaimTemplateName": "y"}
            ]
        ),
    ),
    Case(
        "spec.resources",
        "resources: GPUs are asked for",
        service(gpus=1, resources={"limits": {"nvidia.com/gpu": 1}}),
    ),
    Case(
        "spec.resources",
        "resources: GPUs are asked for",
        service(
            gpus=1,
            resourceName="amd.com/gpu",
            resources={"requests": {"amd.com/gpu": 1}, "limits": {"amd.com/gpu": 1}},
        ),
    ),
    Case(
        "spec.resources",
        "resources: a device",
        service(resources={"requests": {"example.com/npu": 1}, "limits": {"example.com/npu": 2}}),
    ),
    Case(
        "spec.resources",
        "resources: a device",
        service(resources={"requests": {"example.com/npu": "1"}}),
    ),
    Case(
        "spec.topologyKey", "topologyKey: keeps the pods", service(topologyKey="example.com/rack")
    ),
    # Rollout and router.
    Case(
        "spec.rollout.surgeTimeout",
        "surgeTimeout: must be",
        service(rollout={"surgeTimeout": "25h"}),
    ),
    Case(
        "spec.rollout.progressDeadline",
        "progressDeadline: must be",
        service(rollout={"progressDeadline": "0s"}),
    ),
    Case(
        "spec.rollout.drainTimeout",
        "drainTimeout: must be",
        service(rollout={"drainTimeout": "48h"}),
    ),
    Case(
        "spec.router.ref",
        "router.ref: the shared router",
        service(router={"ref": "shared", "replicas": 2}),
    ),
    Case(
        "spec.router.ref",
        "router.ref: the shared router",
        service(router={"ref": "shared", "podTemplate": {"spec": {}}}),
    ),
    Case(
        "spec.router.ref",
        "router.ref: the shared router",
        service(router={"ref": "shared", "apiKeysSecretRef": {"name": "keys"}}),
    ),
    *(
        Case(f"spec.router.{part}.{field}", f"{field}: must be", service(router={part: {field: v}}))
        for part, field, v in (
            ("flowControl", "maxWait", "0s"),
            ("flowControl", "maxEngineWait", "11m"),
            ("flowControl", "ageAfter", "25h"),
            ("flowControl", "maxHold", "25h"),
            ("flowControl", "agedShare", 0),
            ("flowControl", "agedShare", 0.001),
            ("failover", "hangTimeout", "1s"),
            ("failover", "breakerPause", "31s"),
            ("failover", "hedgeAfter", "1ms"),
            ("timeouts", "request", "999ms"),
            ("timeouts", "connect", "6m"),
            ("timeouts", "firstByte", "0ms"),
            ("timeouts", "wholeAnswer", "0ms"),
            ("timeouts", "idle", "25h"),
        )
    ),
    Case(
        "spec.flowControl.objectives",
        "objectives: an objective needs a name",
        {"flowControl": {"objectives": {"": 1}}},
        "LLMRouter",
    ),
    Case(
        "spec.selector.matchExpressions[0].values",
        "selector.matchExpressions: In and NotIn",
        {"selector": {"matchExpressions": [{"key": "team", "operator": "In"}]}},
        "LLMRouter",
    ),
    Case(
        "spec.selector.matchExpressions[0].values",
        "selector.matchExpressions: In and NotIn",
        {"selector": {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["x"]}]}},
        "LLMRouter",
    ),
]

ACCEPTED = [
    Case("", "", service()),
    Case("", "", service(), name="a" * 40),
    Case("", "", {"model": {"uri": "hf://org/Na_me-1.5@refs/pr/1"}}),
    Case("", "", {"model": {"uri": "hf://org/name", "revision": "v1.0"}}),
    Case("", "", {"model": {"uri": "pvc://models"}}),
    Case("", "", {"model": {"uri": "pvc://models/a b/c@2"}}),
    Case("", "", {"model": {"uri": "file:///mnt/models/a b"}}),
    Case("", "", {"model": {"uri": "file:///models/..hidden"}}),
    Case("", "", pvc(claimName="models")),
    Case("", "", pvc(size="10Gi", storageClass="fast", accessMode="ReadWriteOnce")),
    Case("", "", model(cache={"emptyDir": {}})),
    Case("", "", engine(args=["--portable", "--block-size=32", "port"])),
    Case("", "", engine(loadTimeout="1s", kvCacheFraction=1)),
    Case("", "", engine(env=[{"name": "LWS", "value": ""}, {"name": "KVOY_SECRETS"}])),
    Case("", "", service(nodes=2, gpus=8)),
    Case("", "", service(nodes=2, gpus=8, parallelism={"tensor": 8, "pipeline": 2})),
    Case("", "", service(nodes=2, parallelism={"pipeline": 2})),
    Case("", "", service(gpus=1, resourceName="amd.com/gpu")),
    Case("", "", service(gpus=1, resourceClaims=[{"name": "x", "resourceClaimName": "x"}])),
    Case("", "", service(resources={"limits": {"example.com/npu": 2, "memory": "1Gi"}})),
    Case(
        "",
        "",
        service(
            resources={
                "requests": {"example.com/npu": 1, "cpu": 2},
                "limits": {"example.com/npu": "1000m"},
            }
        ),
    ),
    Case("", "", service(nodes=2, topologyKey="example.com/rack")),
    Case("", "", service(rollout={"drainTimeout": "0s", "surgeTimeout": "1m30s"})),
    Case("", "", service(router={"ref": "shared"})),
    Case(
        "",
        "",
        service(
            router={
                "flowControl": {"ageAfter": "0s", "maxHold": "0s", "agedShare": 1, "sharedWait": 0},
                "failover": {"retryShare": 1, "hangTimeout": "2s"},
                "timeouts": {"connect": "10ms", "request": "24h"},
            }
        ),
    ),
    Case("", "", {"flowControl": {"objectives": {"a=b": -1000}}}, "LLMRouter"),
    Case("", "", {"selector": {}}, "LLMRouter"),
    Case(
        "",
        "",
        {"selector": {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["x"]}]}},
        "LLMRouter",
    ),
]

CHANGES = [
    ("spec.model.cache.pvc.size", "cannot shrink", pvc(size="10Gi"), pvc(size="9Gi")),
    (
        "spec.model.cache.pvc.storageClass",
        "storageClass: a claim cannot change it",
        pvc(size="10Gi", storageClass="fast"),
        pvc(size="10Gi", storageClass="slow"),
    ),
    (
        "spec.model.cache.pvc.storageClass",
        "storageClass: a claim cannot change it",
        pvc(size="10Gi"),
        pvc(size="10Gi", storageClass="slow"),
    ),
    (
        "spec.model.cache.pvc.accessMode",
        "accessMode: a claim cannot change it",
        pvc(size="10Gi"),
        pvc(size="10Gi", accessMode="ReadWriteOnce"),
    ),
]

ALLOWED_CHANGES = [
    (pvc(size="1024Mi"), pvc(size="1Gi")),
    (pvc(size="1Gi"), pvc(size="2Gi")),
    (pvc(size="2Gi"), pvc(claimName="models")),
    (pvc(size="2Gi"), model(cache={"emptyDir": {}})),
    (service(), service(nodes=2, gpus=8, prefill={})),
    (service(router={"ref": "shared"}), {"model": CLAIM}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case.field} {case.message}")
@pytest.mark.usefixtures("kvoy_crds")
def test_the_api_server_names_field_and_remedy(api_server: ApiServer, case: Case) -> None:
    with pytest.raises(ApiError) as refused:
        create(api_server, case)

    assert refused.value.status == 422
    causes = json.loads(str(refused.value).partition(": ")[2])["details"]["causes"]
    found = [cause["message"] for cause in causes if cause["field"] == case.field]
    assert any(message_of(text).startswith(case.message) for text in found), causes


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case.field} {case.message}")
def test_the_operator_refuses_in_the_same_words(case: Case) -> None:
    with pytest.raises(InvalidSpec) as refused:
        PARSERS[case.kind](stored(case))

    assert refused.value.message.startswith(case.message.partition(": ")[2])
    field = case.field.replace("[", ".").replace("]", "")
    assert refused.value.field == ("metadata.name" if field == "metadata" else field)


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
@pytest.mark.parametrize("case", ACCEPTED)
def test_the_api_server_accepts_what_keeps_the_rules(api_server: ApiServer, case: Case) -> None:
    created = create(api_server, case)

    assert created["metadata"]["name"] == case.name


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_operator_accepts_what_keeps_the_rules(case: Case) -> None:
    PARSERS[case.kind](stored(case))


def test_no_rule_is_untested() -> None:
    tested = [case.message for case in REFUSED] + [message for _, message, *_ in CHANGES]
    tested += ["service: never changes", "pool: never changes"]
    untested = [
        message
        for definition in DEFINITIONS
        for message in rule_messages(render_crd(definition))
        if not any(beginning in message for beginning in tested)
    ]

    assert not untested


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
@pytest.mark.parametrize(("field", "message", "before", "after"), CHANGES)
def test_a_change_that_would_orphan_work_is_refused(
    api_server: ApiServer, field: str, message: str, before: Spec, after: Spec
) -> None:
    with pytest.raises(ApiError) as refused:
        create_then_change(api_server, "LLMService", before, after)

    causes = json.loads(str(refused.value).partition(": ")[2])["details"]["causes"]
    assert [cause["field"] for cause in causes] == [field]
    assert message in causes[0]["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
@pytest.mark.parametrize(("before", "after"), ALLOWED_CHANGES)
def test_any_other_change_is_allowed(api_server: ApiServer, before: Spec, after: Spec) -> None:
    changed = create_then_change(api_server, "LLMService", before, after)

    assert changed["metadata"]["generation"] == 2 or before == after


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
def test_a_scaler_stays_with_its_pool(api_server: ApiServer) -> None:
    before = {"service": "qwen", "pool": "prefill"}

    with pytest.raises(ApiError, match="service: never changes"):
        create_then_change(api_server, "LLMRoleScaler", before, {**before, "service": "other"})


def create(server: ApiServer, case: Case) -> Any:
    """As a dry run, refusing unknown fields."""
    body = {**stored(case), "metadata": {"name": case.name, "namespace": "default"}}
    path = f"{collection(case.kind, 'default')}?dryRun=All&fieldValidation=Strict"
    return server.api.request("POST", path, body)


def create_then_change(server: ApiServer, kind: str, before: Spec, after: Spec) -> Any:
    path = collection(kind, server.create_namespace())
    body = stored(Case("", "", before, kind))
    created = server.api.request("POST", path, {**body, "metadata": {"name": "qwen"}})
    return server.api.request("PUT", f"{path}/qwen", {**created, "spec": after})


def collection(kind: str, namespace: str) -> str:
    return f"/apis/kvoy.dev/v1alpha1/namespaces/{namespace}/{PLURALS[kind]}"


def stored(case: Case) -> dict[str, Any]:
    """The object as the operator would get it."""
    metadata = {"name": case.name, "namespace": "default", "uid": "u", "generation": 1}
    return {
        "apiVersion": "kvoy.dev/v1alpha1",
        "kind": case.kind,
        "metadata": metadata,
        "spec": case.spec,
    }


def message_of(cause: str) -> str:
    """Without the API server's own beginning."""
    return cause.removeprefix("Invalid value: ")


def rule_messages(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from (rule["message"] for rule in schema.get("x-kubernetes-validations", ()))
        for inner in schema.values():
            yield from rule_messages(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from rule_messages(inner)
