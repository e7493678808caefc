"""The custom resource definitions: current, complete, limited, and served by a real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvoy_cluster.api import ApiError
from kvoy_cluster.api_server import ApiServer, KubectlError
from kvoy_operator import crd
from kvoy_operator.crd import DEFINITIONS, Definition, render_crd
from kvoy_operator.resources import parse_router, parse_scaler, parse_service
from kvoy_operator.spec import LLMServiceSpec

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
CRDS = ROOT / "crds"
MAX_BYTES = 100_000
"""Half of what a client-side apply can carry in its annotation."""

PLAIN = """\
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata:
  name: qwen
spec:
  model: {uri: hf://Qwen/Qwen3-8B}
"""
SPLIT = """\
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata:
  name: qwen
spec:
  model: {uri: hf://Qwen/Qwen3-8B}
  replicas: 4
  gpus: 1
  prefill:
    replicas: 2
    gpus: 1
"""
MULTI_NODE = """\
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata:
  name: llama
spec:
  model: {uri: pvc://models/llama-405b}
  replicas: 3
  nodes: 2
  gpus: 8
  parallelism: {tensor: 8, pipeline: 2}
"""

FULL_POOL = """
replicas: 2
nodes: 2
gpus: 4
resourceName: amd.com/gpu
parallelism: {tensor: 4, pipeline: 2}
resources:
  requests: {cpu: 2, memory: 16Gi, example.com/rdma: 1}
  limits: {memory: 32Gi, example.com/rdma: "1"}
shmSize: 16Gi
topologyKey: example.com/rack
podTemplate: &template
  metadata:
    labels: {team: red, a/b: ""}
    annotations: {note: "x"}
  spec:
    nodeSelector: {pool: gpu}
    tolerations: [{key: spot, operator: Exists}]
    containers:
    - name: engine
      env: [{name: A, value: ""}]
      resources: {limits: {cpu: 1.5}}
      securityContext: null
      unheardOf: {deep: [1, two, null, {three: 3}]}
    - {name: side, $patch: delete}
"""
CLAIMS = """
gpus: 2
resourceClaims:
- {name: gpu, resourceClaimTemplateName: two-gpus, request: all}
- {name: net, resourceClaimName: fabric}
"""
FULL_SERVICES = [
    f"""
{FULL_POOL}
model:
  uri: hf://org/name
  name: name-8b
  revision: 0123456789abcdef0123456789abcdef01234567
  tokenSecretRef: {{name: hub, key: HF_TOKEN}}
  cache: {{pvc: {{size: 100Gi, storageClass: fast, accessMode: ReadWriteOnce}}}}
engine:
  kind: sim
  image: registry.example.com/engine:1
  imagePullPolicy: Always
  args: [--block-size=32]
  env:
  - {{name: A, value: $(B)}}
  - {{name: F, valueFrom: {{fieldRef: {{fieldPath: status.podIP, apiVersion: v1}}}}}}
  - name: R
    valueFrom:
      resourceFieldRef: {{resource: limits.cpu, containerName: engine, divisor: 1m}}
  - {{name: C, valueFrom: {{configMapKeyRef: {{name: c, key: k, optional: true}}}}}}
  - {{name: S, valueFrom: {{secretKeyRef: {{name: s, key: k, optional: false}}}}}}
  - name: E
    valueFrom:
      fileKeyRef: {{volumeName: v, path: a/b, key: k, optional: true}}
  maxModelLen: 8192
  kvCacheFraction: 0.85
  loadTimeout: 1h30m
  podTemplate: *template
prefill:
{"".join(f"  {line}" + chr(10) for line in CLAIMS.strip().splitlines())}
router:
  replicas: 3
  policy: round-robin
  flowControl:
    maxWaiting: 2000
    maxWaitingPerTenant: 500
    maxWaitingPerPriority: 1000
    maxWait: 1m30s
    maxEngineWait: 500ms
    sharedWait: 0.25
    ageAfter: 0s
    agedShare: 0.2
    maxHeld: 10
    maxHold: 2m
    objectives: {{interactive: -5, batch: 5}}
  failover:
    maxRetries: 1
    maxResumes: 0
    hangTimeout: 10s
    retryShare: 1
    retryBurst: 0
    breakerFailures: 5
    breakerPause: 2s
    hedge: Fixed
    hedgeAfter: 500ms
  timeouts:
    request: 20m
    connect: 500ms
    firstByte: 10m
    wholeAnswer: 20m
    idle: 90s
  apiKeysSecretRef: {{name: keys, key: qwen.yaml}}
  tlsSecretRef: {{name: certificate}}
  resources: {{requests: {{cpu: 500m}}, limits: {{cpu: 1}}}}
  podTemplate: *template
rollout:
  strategy: Surge
  maxUnavailable: 2
  surgeTimeout: 30s
  progressDeadline: 2h
  drainTimeout: 10m
imagePullSecrets: [{{name: registry}}]
""",
    "model: {uri: hf://a/b, cache: {pvc: {claimName: models}}}\nrouter: {ref: shared}" + CLAIMS,
    "model: {uri: hf://a/b, cache: {hostPath: {path: /models}}}\nprefill: {replicas: 1}",
    "model: {uri: hf://a/b, cache: {emptyDir: {sizeLimit: 50Gi}}}\nprefill:\n"
    + "".join(f"  {line}\n" for line in FULL_POOL.strip().splitlines()),
]
FULL_ROUTER = """
replicas: 3
policy: least-load
flowControl:
  maxWaiting: 2000
  maxWaitingPerTenant: 500
  maxWaitingPerPriority: 1000
  maxWait: 1m30s
  maxEngineWait: 500ms
  sharedWait: 0.25
  ageAfter: 0s
  agedShare: 0.2
  maxHeld: 10
  maxHold: 2m
  objectives: {interactive: -5, batch: 5}
failover:
  maxRetries: 1
  maxResumes: 0
  hangTimeout: 10s
  retryShare: 1
  retryBurst: 0
  breakerFailures: 5
  breakerPause: 2s
  hedge: Observed
  hedgeAfter: 2s
timeouts:
  request: 20m
  connect: 500ms
  firstByte: 10m
  wholeAnswer: 20m
  idle: 90s
apiKeysSecretRef: {name: keys, key: qwen.yaml}
tlsSecretRef: {name: certificate}
resources: {requests: {cpu: 1}, limits: {memory: 1Gi}}
podTemplate:
  metadata: {labels: {team: red}, annotations: {note: x}}
  spec: {priorityClassName: high}
selector:
  matchLabels: {team: red}
  matchExpressions:
  - {key: tier, operator: In, values: [gold, silver]}
weights:
- {service: blue, weight: 90}
- {service: green, weight: 0}
"""
CONDITIONS = """
observedGeneration: 3
conditions:
- type: Ready
  status: "False"
  reason: Unschedulable
  message: "qwen-s-abc123-x: 0/2 nodes are available"
  lastTransitionTime: "2026-01-02T03:04:05Z"
  observedGeneration: 3
"""
STATUS = {
    "LLMService": f"""
{CONDITIONS}
url: http://qwen.default.svc/v1
model: name-8b
replicas: 2
selector: kvoy.dev/service=qwen,kvoy.dev/pool=serving
pools:
- {{name: serving, desired: 2, ready: 1, updated: 1, replicasOwner: LLMService, revision: abc123}}
- {{name: prefill, desired: 1, ready: 0, updated: 0, replicasOwner: LLMRoleScaler}}
revision: {{current: abc123, update: def456}}
""",
    "LLMRouter": f"""
{CONDITIONS}
url: http://shared.default.svc/v1
models: [name-8b]
services: [{{name: blue, model: name-8b, weight: 90}}]
replicas: 2
readyReplicas: 1
""",
    "LLMRoleScaler": f"{CONDITIONS}\nreplicas: 2\nselector: kvoy.dev/service=qwen\n",
}


@pytest.fixture(params=DEFINITIONS, ids=lambda definition: definition.kind)
def definition(request: pytest.FixtureRequest) -> Definition:
    definition: Definition = request.param
    return definition


def test_the_committed_files_are_current() -> None:
    assert crd.main(["--check", str(CRDS)]) == 0


def test_there_are_no_other_files() -> None:
    assert {path.name for path in CRDS.iterdir()} == {d.file_name for d in DEFINITIONS}


def test_a_stale_or_missing_file_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert crd.main([str(tmp_path)]) == 0
    (tmp_path / "llmservices.kvoy.dev.yaml").write_text("old")
    (tmp_path / "llmrouters.kvoy.dev.yaml").unlink()

    assert crd.main(["--check", str(tmp_path)]) == 1

    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" is not what the specs say")[0] for line in told] == [
        str(tmp_path / "llmservices.kvoy.dev.yaml"),
        str(tmp_path / "llmrouters.kvoy.dev.yaml"),
    ]


def test_a_wrong_command_line_gets_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main([]) == 2
    assert "usage: python -m kvoy_operator.crd" in capsys.readouterr().err


def test_the_reference_names_every_field_that_users_write(definition: Definition) -> None:
    reference = (ROOT / "docs" / "crds.md").read_text()
    spec = schema_of(definition)["properties"]["spec"]["properties"]

    names = set(spec)
    for part in ("model", "engine", "router", "rollout"):
        names |= {f"{part}.{name}" for name in spec.get(part, {}).get("properties", {})}
    assert not [name for name in sorted(names) if f"`{name}`" not in reference and name not in spec]
    assert not [name for name in sorted(spec) if name not in reference]


def test_the_examples_of_the_reference_can_be_read() -> None:
    parts = (ROOT / "docs" / "crds.md").read_text().split("```yaml\n")[1:]
    service, router = (yaml.safe_load(part.partition("```")[0]) for part in parts)

    assert parse_service(stored(service)).name == "qwen"
    assert parse_router(stored(router)).spec.weights[1].weight == 10


def test_a_definition_is_small(definition: Definition) -> None:
    assert (CRDS / definition.file_name).stat().st_size < MAX_BYTES
    assert len(json.dumps(render_crd(definition))) < MAX_BYTES


def test_every_field_is_described_and_limited(definition: Definition) -> None:
    for path, schema in fields_of(definition):
        assert schema.get("description", "").endswith("."), path
        kind = schema.get("type")
        if kind == "string":
            has_limit = schema.keys() & {"maxLength", "enum"} or schema.get("format") == "date-time"
            assert has_limit, path
        if kind == "array":
            assert "maxItems" in schema, path
        if kind == "integer" and ".spec" in path:
            assert {"minimum", "maximum"} <= schema.keys(), path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path


def test_a_default_that_may_get_better_is_not_in_the_schema(definition: Definition) -> None:
    defaults = {
        path: schema["default"] for path, schema in fields_of(definition) if "default" in schema
    }

    assert not [path for path in defaults if path.endswith(("Timeout", "Size", "policy"))]


@pytest.mark.parametrize(("text", "max_lines"), [(PLAIN, 6), (SPLIT, 12), (MULTI_NODE, 12)])
def test_common_services_are_short(text: str, max_lines: int) -> None:
    assert len(text.splitlines()) <= max_lines

    parse_service(stored(yaml.safe_load(text)))


def test_parallelism_follows_from_nodes_and_gpus() -> None:
    spec = LLMServiceSpec.model_validate(
        {"model": {"uri": "pvc://models/x"}, "nodes": 2, "gpus": 8}
    )
    on_cpu = LLMServiceSpec.model_validate({"model": {"uri": "pvc://models/x"}})

    assert (spec.effective_parallelism.tensor, spec.effective_parallelism.pipeline) == (8, 2)
    assert (on_cpu.effective_parallelism.tensor, on_cpu.effective_parallelism.pipeline) == (1, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
@pytest.mark.parametrize("text", [PLAIN, SPLIT, MULTI_NODE], ids=["plain", "split", "multi-node"])
def test_common_services_are_accepted(api_server: ApiServer, text: str) -> None:
    namespace = api_server.create_namespace()

    api_server.kubectl("apply", "-n", namespace, "-f", "-", input=text)


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
def test_only_lasting_defaults_are_stored(api_server: ApiServer) -> None:
    created = create(api_server, "LLMService", {"model": {"uri": "hf://a/b"}, "prefill": {}})

    assert created["spec"] == {
        "model": {"uri": "hf://a/b"},
        "engine": {"kind": "native"},
        "replicas": 1,
        "nodes": 1,
        "gpus": 0,
        "prefill": {"nodes": 1, "gpus": 0},
    }


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("spec.replica", {"replica": 2}),
        ("spec.model.url", {"model": {"uri": "hf://a/b", "url": "x"}}),
        ("spec.prefill.router", {"prefill": {"router": {}}}),
        ("spec.podTemplate.containers", {"podTemplate": {"containers": []}}),
        ("spec.podTemplate.metadata.name", {"podTemplate": {"metadata": {"name": "x"}}}),
        (
            "spec.engine.env[0].valueFrom.secretRef",
            {"engine": {"env": [{"name": "A", "valueFrom": {"secretRef": {}}}]}},
        ),
    ],
)
def test_an_unknown_field_is_refused_by_its_path(
    api_server: ApiServer, path: str, spec: Json
) -> None:
    with pytest.raises(ApiError, match="unknown field") as refused:
        create(api_server, "LLMService", {"model": {"uri": "hf://a/b"}, **spec})

    assert f'unknown field \\"{path}\\"' in str(refused.value)


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
def test_kubectl_refuses_unknown_fields_unasked(api_server: ApiServer) -> None:
    text = PLAIN + "  replicass: 2\n"

    with pytest.raises(KubectlError, match=r'unknown field "spec.replicass"'):
        api_server.kubectl("apply", "-n", "default", "-f", "-", input=text)


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
def test_kubectl_explains_every_field_of_a_spec(
    api_server: ApiServer, definition: Definition
) -> None:
    explained = api_server.kubectl("explain", f"{definition.short_names[0]}.spec")

    schema = schema_of(definition)["properties"]["spec"]
    for name, field in schema["properties"].items():
        assert f"  {name}\t" in explained
        assert field["description"].split()[0] in explained
    assert schema["description"] in " ".join(explained.split())


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
@pytest.mark.parametrize("text", FULL_SERVICES, ids=["all", "claim", "node", "pod"])
def test_a_service_is_stored_whole(api_server: ApiServer, text: str) -> None:
    spec = yaml.safe_load(text)

    created = create(api_server, "LLMService", spec)

    assert_contains(created["spec"], spec)
    parse_service(created)


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
def test_a_router_is_stored_whole(api_server: ApiServer) -> None:
    spec = yaml.safe_load(FULL_ROUTER)

    created = create(api_server, "LLMRouter", spec)

    assert created["spec"] == spec
    parse_router(created)


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
def test_a_scaler_is_stored_whole(api_server: ApiServer) -> None:
    created = create(api_server, "LLMRoleScaler", {"service": "qwen", "pool": "prefill"})

    assert created["spec"] == {"service": "qwen", "pool": "prefill", "replicas": 1}
    assert parse_scaler(created).spec.replicas == 1


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
def test_a_status_is_stored_whole(api_server: ApiServer, definition: Definition) -> None:
    created = create(api_server, definition.kind, SPECS[definition.kind][0])
    status = yaml.safe_load(STATUS[definition.kind])

    path = f"{path_of(created)}/status?fieldValidation=Strict"
    written = api_server.api.request("PUT", path, {**created, "status": status})

    assert written["status"] == status


def test_the_full_objects_have_every_field(definition: Definition) -> None:
    schema = schema_of(definition)["properties"]
    written: set[str] = set()
    for spec in SPECS[definition.kind]:
        written |= set(paths_in(spec, schema["spec"], "spec"))
    written |= set(paths_in(yaml.safe_load(STATUS[definition.kind]), schema["status"], "status"))

    assert written == {path.removeprefix(".") for path, _ in fields_of(definition)}


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
@pytest.mark.parametrize("kind", ["LLMService", "LLMRoleScaler"])
def test_a_count_is_scaled_by_kubectl(api_server: ApiServer, kind: str) -> None:
    created = create(api_server, kind, SPECS[kind][-1])
    path = path_of(created)
    status = {"replicas": 1, "selector": "kvoy.dev/service=qwen"}
    api_server.api.request("PUT", f"{path}/status", {**created, "status": status})

    namespace = created["metadata"]["namespace"]
    api_server.kubectl("scale", f"{plural_of(kind)}/qwen", "-n", namespace, "--replicas=3")

    scale = api_server.api.get(f"{path}/scale")
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == status
    assert api_server.api.get(path)["spec"]["replicas"] == 3


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
def test_kubectl_lists_what_people_look_for(api_server: ApiServer) -> None:
    created = create(api_server, "LLMService", {"model": {"uri": "hf://a/b"}})
    status = yaml.safe_load(STATUS["LLMService"])
    api_server.api.request("PUT", f"{path_of(created)}/status", {**created, "status": status})
    namespace = created["metadata"]["namespace"]

    plain = api_server.kubectl("get", "llm", "-n", namespace).split()
    wide = api_server.kubectl("get", "inference", "-n", namespace, "-o", "wide").split()

    url = "http://qwen.default.svc/v1"
    assert plain[:6] == ["NAME", "MODEL", "READY", "REASON", "URL", "AGE"]
    assert plain[6:11] == ["qwen", "name-8b", "False", "Unschedulable", url]
    assert wide[5:8] == ["SERVING", "PREFILL", "ENGINE"]
    assert wide[14:17] == ["1", "0", "native"]


def create(server: ApiServer, kind: str, spec: Json) -> Json:
    path = f"/apis/kvoy.dev/v1alpha1/namespaces/{server.create_namespace()}/{plural_of(kind)}"
    body = {
        "apiVersion": "kvoy.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": "qwen"},
        "spec": spec,
    }
    created: Json = server.api.request("POST", f"{path}?fieldValidation=Strict", body)
    return created


def path_of(body: Json) -> str:
    namespace = body["metadata"]["namespace"]
    plural = plural_of(body["kind"])
    return f"/apis/kvoy.dev/v1alpha1/namespaces/{namespace}/{plural}/{body['metadata']['name']}"


def plural_of(kind: str) -> str:
    return next(definition.plural for definition in DEFINITIONS if definition.kind == kind)


def stored(body: Json) -> Json:
    metadata = {**body["metadata"], "namespace": "default", "uid": "u", "generation": 1}
    return {**body, "metadata": metadata}


def schema_of(definition: Definition) -> Json:
    (version,) = render_crd(definition)["spec"]["versions"]
    schema: Json = version["schema"]["openAPIV3Schema"]
    return schema


def fields_of(definition: Definition) -> Iterator[tuple[str, Json]]:
    """Every field below spec and status, with its schema."""
    for part in ("spec", "status"):
        yield from walk(schema_of(definition)["properties"][part], f".{part}")


def walk(schema: Json, path: str) -> Iterator[tuple[str, Json]]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}", inner
        yield from walk(inner, f"{path}.{name}")
        yield from walk(inner.get("items", {}), f"{path}.{name}")


def paths_in(value: Any, schema: Json, path: str) -> Iterator[str]:
    """Paths of the declared fields that the value has."""
    if isinstance(value, list):
        for element in value:
            yield from paths_in(element, schema["items"], path)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name in schema.get("properties", {}):
                yield f"{path}.{name}"
                yield from paths_in(inner, schema["properties"][name], f"{path}.{name}")


def assert_contains(whole: Any, part: Any) -> None:
    """All of `part` is in `whole`, which may have defaults beside it."""
    if isinstance(part, dict):
        for name, value in part.items():
            assert_contains(whole[name], value)
    elif isinstance(part, list):
        assert len(whole) == len(part)
        for one, other in zip(whole, part, strict=True):
            assert_contains(one, other)
    else:
        assert whole == part


SPECS: dict[str, list[Json]] = {
    "LLMService": [yaml.safe_load(text) for text in FULL_SERVICES],
    "LLMRouter": [yaml.safe_load(FULL_ROUTER)],
    "LLMRoleScaler": [{"service": "qwen", "pool": "prefill", "replicas": 1}],
}
