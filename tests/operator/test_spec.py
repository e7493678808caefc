"""Specs as the operator reads them: typed, with what is wrong told by field."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest
import yaml

from kvoy_cluster.api import ApiError
from kvoy_cluster.api_server import ApiServer
from kvoy_operator.errors import InvalidSpec
from kvoy_operator.manifests.engine import engine_template
from kvoy_operator.render_testing import make_options
from kvoy_operator.resources import LLMService, parse_router, parse_scaler, parse_service
from kvoy_operator.spec import LabelSelector

Json = dict[str, Any]

SERVICE = """
model:
  uri: hf://org/name
  name: name-8b
  revision: v1
  tokenSecretRef: {name: hub, key: HF_TOKEN}
  cache: {pvc: {size: 100Gi, storageClass: fast, accessMode: ReadWriteOnce}}
engine:
  kind: sim
  image: registry.example.com/engine:1
  imagePullPolicy: Always
  args: [--block-size=32]
  env:
  - {name: A, value: b}
  - {name: S, valueFrom: {secretKeyRef: {name: s, key: k, optional: false}}}
  maxModelLen: 8192
  kvCacheFraction: 0.85
  loadTimeout: 1h30m
  podTemplate: {metadata: {labels: {team: red}}, spec: {nodeSelector: {a: b}}}
replicas: 2
nodes: 2
gpus: 4
resourceName: amd.com/gpu
parallelism: {tensor: 4, pipeline: 2}
resources: {requests: {cpu: 2}, limits: {memory: 32Gi}}
shmSize: 16Gi
topologyKey: example.com/rack
prefill:
  gpus: 2
  resourceClaims: [{name: gpu, resourceClaimTemplateName: two-gpus, request: all}]
router: {replicas: 3, policy: round-robin, resources: {limits: {cpu: 1}}}
rollout:
  strategy: Surge
  maxUnavailable: 2
  surgeTimeout: 30s
  progressDeadline: 2h
  drainTimeout: 10m
imagePullSecrets: [{name: registry}]
"""
ROUTER = """
replicas: 3
policy: least-load
selector:
  matchLabels: {team: red}
  matchExpressions: [{key: tier, operator: In, values: [gold]}]
weights: [{service: blue, weight: 90}]
"""
ODD_VALUES: list[Any] = [
    *("", "x", "a" * 40_000, "-1", "1", "1h", "10Gi", "a/b", "/x", "UPPER", "é", "a b", "a\nb"),
    *(0, -1, 1.5, 10**6, 2**40, True, [], {}, ["x"], {"a": "b"}, None),
]


def body(spec: Json, kind: str = "LLMService", **metadata: Any) -> Json:
    ours = {"name": "qwen", "namespace": "default", "uid": "u1", "generation": 3}
    return {
        "apiVersion": "kvoy.dev/v1alpha1",
        "kind": kind,
        "metadata": {**ours, **metadata},
        "spec": spec,
    }


def service(**fields: Any) -> LLMService:
    return parse_service(body({"model": {"uri": "hf://org/name"}, **fields}))


def test_a_service_is_read_whole() -> None:
    read = parse_service(
        {**body(yaml.safe_load(SERVICE), labels={"a": "b"}), "status": {"url": "http://x"}}
    )

    assert (read.kind, read.namespace, read.name) == ("LLMService", "default", "qwen")
    assert (read.uid, read.generation, read.labels) == ("u1", 3, {"a": "b"})
    assert (read.annotations, read.status) == ({}, {"url": "http://x"})
    spec = read.spec
    assert spec.model.reference == "hf://org/name@v1"
    assert spec.engine.load_timeout.seconds == 5400
    assert spec.engine.env[1].value_from is not None
    assert spec.resources.requests == {"cpu": "2"}
    assert spec.pools.keys() == {"serving", "prefill"}
    assert spec.pools["serving"].gpu_resource == "amd.com/gpu"
    assert spec.progress_deadline_s == 7200


def test_what_is_left_out_is_filled_in() -> None:
    spec = service().spec

    assert (spec.replicas, spec.nodes, spec.gpus, spec.engine.kind) == (1, 1, 0, "native")
    assert (spec.router.replicas, spec.router.policy) == (2, "kv-aware")
    assert (spec.rollout.strategy, spec.rollout.drain_timeout) == ("Auto", "5m")
    assert spec.progress_deadline_s == 30 * 60 + 600
    assert spec.pools["serving"].gpu_resource == "nvidia.com/gpu"
    assert spec.pools.keys() == {"serving"}


def test_a_prefill_pool_without_a_count_leaves_it_to_its_scaler() -> None:
    assert service(prefill={}).spec.pools["prefill"].replicas is None


def test_the_model_takes_the_service_s_name_unless_it_has_one() -> None:
    named = service(model={"uri": "hf://org/name", "name": "other"})

    assert (service().model_name, named.model_name) == ("qwen", "other")


@pytest.mark.parametrize(
    ("field", "message", "fields"),
    [
        ("spec.model.uri", "Field required", {"model": {}}),
        ("spec.replicass", "no such field", {"replicass": 1}),
        ("spec.prefill.rollout", "no such field", {"prefill": {"rollout": {}}}),
        ("spec.replicas", "less than or equal to 1000", {"replicas": 1001}),
        ("spec.gpus", "valid integer", {"gpus": "1"}),
        ("spec.shmSize", "'8GB' is not a quantity", {"shmSize": "8GB"}),
        (
            "spec.resources.limits.cpu",
            "'x' is not a quantity",
            {"resources": {"limits": {"cpu": "x"}}},
        ),
        (
            "spec.rollout.drainTimeout",
            "'5 min' is not a duration",
            {"rollout": {"drainTimeout": "5 min"}},
        ),
        ("spec.router.policy", "'kv-aware', 'least-load' or", {"router": {"policy": "best"}}),
        ("spec.podTemplate", "containers is no part", {"podTemplate": {"containers": []}}),
        (
            "spec.engine.podTemplate",
            "metadata.name cannot be patched",
            {"engine": {"podTemplate": {"metadata": {"name": "x"}}}},
        ),
    ],
)
def test_a_wrong_field_is_named(field: str, message: str, fields: Json) -> None:
    with pytest.raises(InvalidSpec) as refused:
        service(**fields)

    assert refused.value.field == field
    assert message in refused.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": {"kind": "sim", "maxModelLen": 10, "kvCacheFraction": 0.5}, "prefill": {}},
        {"engine": {"kind": "sim"}, "nodes": 2, "gpus": 2},
    ],
)
def test_what_the_operator_passes_to_an_engine_cannot_be_passed_again(fields: Json) -> None:
    template = engine_template(service(**fields), "serving", "abc123", make_options())
    arguments = template["spec"]["containers"][0]["args"]
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]

    for flag in sorted({*flags} - {"--log-format"}):
        with pytest.raises(InvalidSpec, match=r"^spec\.engine\.args: "):
            service(engine={"args": [f"{flag}=1"]})


def test_a_missing_spec_is_told() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.model: Field required"):
        parse_service({**body({}), "spec": None})


def test_a_scaler_is_read() -> None:
    spec = {"service": "qwen", "pool": "prefill", "replicas": 4}

    assert parse_scaler(body(spec, "LLMRoleScaler", name="qwen-prefill")).spec.replicas == 4


@pytest.mark.parametrize(
    ("selector", "labels", "is_selected"),
    [
        ({}, {}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "1", "b": "2"}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "2"}, False),
        ({"matchLabels": {"a": ""}}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]}, {"a": "1"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": [""]}]}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, {}, True),
        (
            {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]},
            {"a": "1"},
            False,
        ),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"a": ""}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {"a": ""}, False),
        (
            {"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "b", "operator": "Exists"}]},
            {"a": "1"},
            False,
        ),
    ],
)
def test_a_selector_selects_as_kubernetes_does(
    selector: Json, labels: Mapping[str, str], is_selected: bool
) -> None:
    assert LabelSelector.model_validate(selector).matches(labels) is is_selected


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
@pytest.mark.parametrize("kind", ["LLMService", "LLMRouter"])
def test_operator_and_api_server_accept_the_same(api_server: ApiServer, kind: str) -> None:
    """One field at a time gets an odd value; nulls go unseen, since the API server drops them."""
    whole = yaml.safe_load(SERVICE if kind == "LLMService" else ROUTER)
    random = Random(7)
    num_accepted = 0

    for path in paths_in(whole):
        for value in random.sample(ODD_VALUES, 7):
            spec = with_value(whole, path, value)
            stored = stored_by_api(api_server, kind, spec)
            is_readable = can_read(kind, spec if stored is None else stored["spec"])
            assert is_readable == (stored is not None), (path, value)
            num_accepted += is_readable

    assert num_accepted > 5


def stored_by_api(server: ApiServer, kind: str, spec: Json) -> Json | None:
    """As a dry run; None: refused."""
    path = f"/apis/kvoy.dev/v1alpha1/namespaces/default/{kind.lower()}s"
    new = {**body(spec, kind), "metadata": {"name": "qwen"}}
    try:
        stored: Json = server.api.request("POST", f"{path}?dryRun=All&fieldValidation=Strict", new)
    except ApiError as error:
        if error.status not in (400, 422):
            raise
        return None
    return stored


def can_read(kind: str, spec: Json) -> bool:
    parse = parse_service if kind == "LLMService" else parse_router
    try:
        parse(body(spec, kind))
    except InvalidSpec:
        return False
    return True


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all fields and elements, except inside patches, which may hold anything."""
    if path:
        yield path
    if path and path[-1] == "podTemplate":
        return
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        yield from paths_in(inner, (*path, key))


def with_value(whole: Json, path: tuple[Any, ...], value: Any) -> Json:
    changed = copy.deepcopy(whole)
    part: Any = changed
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return changed
