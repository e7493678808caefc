"""Patches of pod templates: merged as the API server merges them, kept off what we need."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvoy_cluster.api import ApiError
from kvoy_cluster.api_server import ApiServer
from kvoy_operator.errors import InvalidSpec
from kvoy_operator.pod_patch import merge_pod_template

STRATEGIC = "application/strategic-merge-patch+json"

Json = dict[str, Any]

BASE: Json = {
    "metadata": {
        "labels": {"kvoy.dev/service": "qwen", "app.kubernetes.io/name": "kvoy", "team": "red"},
        "annotations": {"a": "1"},
    },
    "spec": {
        "containers": [
            {
                "name": "engine",
                "image": "engine:1",
                "command": ["kvoy", "serve"],
                "args": ["model"],
                "env": [
                    {"name": "KVOY_SECRET", "value": "secret"},
                    {"name": "HF_HOME", "value": "/models"},
                ],
                "ports": [
                    {"containerPort": 8100, "name": "http", "protocol": "TCP"},
                    {"containerPort": 9100, "name": "grpc", "protocol": "TCP"},
                ],
                "resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "1"}},
                "volumeMounts": [
                    {"name": "shm", "mountPath": "/dev/shm"},
                    {"name": "models", "mountPath": "/models"},
                ],
                "securityContext": {"runAsUser": 1000, "capabilities": {"drop": ["ALL"]}},
                "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
                "terminationMessagePath": "/dev/termination-log",
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
            {"name": "models", "emptyDir": {}},
        ],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "maxSkew": 1,
                "whenUnsatisfiable": "ScheduleAnyway",
            }
        ],
        "automountServiceAccountToken": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 330,
    },
}


def spec(**fields: Any) -> Json:
    return {"spec": fields}


def engine(**fields: Any) -> Json:
    return spec(containers=[{"name": "engine", **fields}])


ALLOWED = {
    "nothing": {},
    "labels and annotations": {
        "metadata": {"labels": {"team": "blue"}, "annotations": {"a": None}}
    },
    "scheduling": spec(
        nodeSelector={"pool": "gpu"},
        priorityClassName="high",
        runtimeClassName="nvidia",
        serviceAccountName="models",
        imagePullSecrets=[{"name": "registry"}],
    ),
    "tolerations are replaced": spec(tolerations=[{"key": "spot", "operator": "Exists"}]),
    "affinity": spec(
        affinity={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}
                    ]
                }
            }
        }
    ),
    "spread of the same topology": spec(
        topologySpreadConstraints=[{"topologyKey": "kubernetes.io/hostname", "maxSkew": 2}]
    ),
    "spread of another topology": spec(
        topologySpreadConstraints=[
            {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
        ]
    ),
    "host aliases": spec(hostAliases=[{"ip": "10.0.0.1", "hostnames": ["hub"]}]),
    "a sidecar before the engine": spec(
        containers=[{"name": "proxy", "image": "proxy:1"}, {"name": "engine", "tty": True}]
    ),
    "an init container": spec(initContainers=[{"name": "wait", "image": "wait:1"}]),
    "more environment": engine(env=[{"name": "A", "value": "b"}]),
    "another value": engine(env=[{"name": "HF_HOME", "value": "/other"}]),
    "a variable less": engine(env=[{"name": "HF_HOME", "$patch": "delete"}]),
    "another port": engine(ports=[{"containerPort": 7000, "name": "debug"}]),
    "another mount": {
        "spec": {
            "containers": [
                {"name": "engine", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
            ],
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
        }
    },
    "another kind of volume": spec(
        volumes=[
            {
                "name": "models",
                "$retainKeys": ["name", "persistentVolumeClaim"],
                "persistentVolumeClaim": {"claimName": "models"},
            }
        ]
    ),
    "resources": engine(resources={"limits": {"memory": "8Gi"}, "requests": {"cpu": None}}),
    "security context extended": engine(securityContext={"capabilities": {"add": ["IPC_LOCK"]}}),
    "security context removed": engine(securityContext=None),
    "security context emptied": engine(securityContext={"$patch": "delete"}),
    "security context replaced": engine(
        securityContext={"$patch": "replace", "runAsNonRoot": True}
    ),
    "probe added": engine(readinessProbe={"httpGet": {"port": 8100}, "periodSeconds": 5}),
    "unmatched null": spec(dnsPolicy=None, nodeSelector={"a": None, "b": "c"}),
    "unmatched delete": spec(
        nodeSelector={"$patch": "delete", "a": "b"},
        initContainers=[{"name": "wait", "$patch": "delete"}],
    ),
}

REFUSED = {
    "no engine": (spec(containers=[{"name": "engine", "$patch": "delete"}]), "containers[engine]"),
    "other containers": (
        spec(containers=[{"$patch": "replace"}, {"name": "mine", "image": "mine"}]),
        "containers[engine]",
    ),
    "another command": (engine(command=["sh"]), "containers[engine].command"),
    "other arguments": (engine(args=[]), "containers[engine].args"),
    "no lifecycle": (engine(lifecycle=None), "containers[engine].lifecycle"),
    "no message": (
        engine(terminationMessagePolicy="File"),
        "containers[engine].terminationMessagePolicy",
    ),
    "a port less": (
        engine(ports=[{"containerPort": 8100, "$patch": "delete"}]),
        "containers[engine].ports",
    ),
    "a port renamed": (
        engine(ports=[{"containerPort": 8100, "name": "web"}]),
        "containers[engine].ports",
    ),
    "another secret": (
        engine(env=[{"name": "KVOY_SECRET", "value": "x"}]),
        "containers[engine].env[KVOY_SECRET]",
    ),
    "a variable of ours": (
        engine(env=[{"name": "LWS_GROUP_SIZE", "value": "1"}]),
        "containers[engine].env[LWS_GROUP_SIZE]",
    ),
    "no mount": (
        engine(volumeMounts=[{"mountPath": "/dev/shm", "$patch": "delete"}]),
        "containers[engine].volumeMounts",
    ),
    "no volume": (spec(volumes=[{"name": "shm", "$patch": "delete"}]), "volumes"),
    "more GPUs": (
        engine(resources={"limits": {"nvidia.com/gpu": 2}}),
        "containers[engine].resources.limits.nvidia.com/gpu",
    ),
    "grace": (spec(terminationGracePeriodSeconds=1), "terminationGracePeriodSeconds"),
    "token": (spec(automountServiceAccountToken=True), "automountServiceAccountToken"),
    "restarts": (spec(restartPolicy="Never"), "restartPolicy"),
    "everything": ({"spec": None}, "automountServiceAccountToken"),
    "element without its key": (spec(containers=[{"image": "x"}]), "containers"),
    "no list": (spec(containers={"name": "engine"}), "containers"),
    "order": (engine(**{"$setElementOrder/env": []}), "containers[engine].$setElementOrder/env"),
    "bad directive": (spec(nodeSelector={"$patch": "merge"}), "nodeSelector.$patch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_operator_needs_cannot_be_taken_away(name: str) -> None:
    patch, path = REFUSED[name]

    with pytest.raises(InvalidSpec) as refused:
        merge_pod_template(BASE, patch, field="spec.prefill.podTemplate")

    assert refused.value.field == f"spec.prefill.podTemplate.spec.{path}"


@pytest.mark.parametrize(
    "label", ["kvoy.dev/service", "kvoy.dev/new", "app.kubernetes.io/managed-by"]
)
def test_labels_that_find_pods_stay(label: str) -> None:
    with pytest.raises(InvalidSpec, match=f"metadata.labels.{label}: the operator finds"):
        merge_pod_template(BASE, {"metadata": {"labels": {label: "x"}}})


def test_neither_side_is_changed() -> None:
    base, patches = copy.deepcopy(BASE), copy.deepcopy(ALLOWED)

    for patch in patches.values():
        merge_pod_template(base, patch)

    assert (base, patches) == (BASE, ALLOWED)


def test_another_container_can_be_the_one_that_stays() -> None:
    base = {"spec": {"containers": [{"name": "router", "command": ["kvoy"]}]}}

    with pytest.raises(InvalidSpec, match="the container router must stay"):
        merge_pod_template(
            base, spec(containers=[{"name": "router", "$patch": "delete"}]), container="router"
        )


def test_a_router_keeps_the_account_with_its_rights() -> None:
    base = {"spec": {"containers": [{"name": "router"}], "serviceAccountName": "qwen-router"}}

    with pytest.raises(InvalidSpec, match=r"serviceAccountName: the router finds its engines"):
        merge_pod_template(base, spec(serviceAccountName="mine"), container="router")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALLOWED)
def test_the_api_server_merges_the_same(api_server: ApiServer, name: str) -> None:
    merged = merge_pod_template(BASE, ALLOWED[name])

    assert merged_by_api(api_server, ALLOWED[name]) == as_stored(api_server, merged)


@pytest.mark.slow
def test_the_api_server_merges_random_patches_the_same(api_server: ApiServer) -> None:
    num_compared = 0
    for seed in range(150):
        patch = random_patch(Random(seed))
        try:
            merged = merge_pod_template(BASE, patch)
        except InvalidSpec:
            continue
        try:
            expected = merged_by_api(api_server, patch)
        except ApiError:
            with pytest.raises(ApiError):
                as_stored(api_server, merged)
            continue
        assert expected == as_stored(api_server, merged), patch
        num_compared += 1

    assert num_compared > 50


def merged_by_api(server: ApiServer, patch: Json) -> Json:
    """The template of a Deployment after a PATCH with it."""
    path = f"/apis/apps/v1/namespaces/{namespace(server)}/deployments"
    if not server.api.exists(f"{path}/base"):
        server.api.request("POST", path, deployment("base", BASE))
    body = {"spec": {"template": patch}}
    answer = server.api.request("PATCH", f"{path}/base?dryRun=All", body, STRATEGIC)
    template: Json = answer["spec"]["template"]
    return template


def as_stored(server: ApiServer, template: Json) -> Json:
    """The template as the API server would store it, with its defaults."""
    path = f"/apis/apps/v1/namespaces/{namespace(server)}/deployments?dryRun=All"
    stored: Json = server.api.request("POST", path, deployment("merged", template))
    result: Json = stored["spec"]["template"]
    return result


_namespaces: dict[int, str] = {}


def namespace(server: ApiServer) -> str:
    """One for all patches: only the base Deployment is really made in it."""
    if id(server) not in _namespaces:
        _namespaces[id(server)] = server.create_namespace()
    return _namespaces[id(server)]


def deployment(name: str, template: Json) -> Json:
    labels = {"kvoy.dev/service": "qwen"}
    body = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
    return {"metadata": {"name": name}, "spec": body}


def random_patch(random: Random) -> Json:
    """A patch that meets what `BASE` has, and adds to it, in any order."""
    parts: list[Callable[[Random], Json]] = [
        lambda r: {"containers": random_containers(r)},
        lambda r: {"volumes": random_volumes(r)},
        lambda r: {"tolerations": [{"key": str(n)} for n in range(r.randrange(3))]},
        lambda r: {"nodeSelector": random_map(r)},
        lambda r: {
            "imagePullSecrets": [{"name": name} for name in r.sample("abc", r.randrange(4))]
        },
        lambda r: {
            "hostAliases": [
                {"ip": f"10.0.0.{n}", "hostnames": [str(n)]} for n in r.sample(range(4), 2)
            ]
        },
        lambda r: {
            "topologySpreadConstraints": [
                {"topologyKey": key, "maxSkew": 3, "whenUnsatisfiable": "DoNotSchedule"}
                for key in r.sample(["kubernetes.io/hostname", "zone", "rack"], 2)
            ]
        },
    ]
    body: Json = {}
    for part in random.sample(parts, random.randrange(1, 4)):
        body |= part(random)
    return {"spec": body, "metadata": {"annotations": random_map(random)}}


def random_containers(random: Random) -> list[Json]:
    """New ones without directives inside: the API server keeps such elements, we do not."""
    changes: list[Json] = [
        {"env": random_env(random)},
        {"securityContext": random.choice([None, {"$patch": "delete"}, {"runAsUser": 7}])},
        {"securityContext": {"capabilities": random.choice([None, {"add": ["IPC_LOCK"]}])}},
        {"volumeMounts": [{"mountPath": "/data", "name": "shm", "readOnly": True}]},
        {"resources": {"limits": {"memory": random.choice(["1Gi", None])}}},
    ]
    engine_patch = {"name": "engine", **random.choice(changes)}
    others: list[Json] = [
        {"name": name, "image": "x", "env": random_env(random, may_delete=False)}
        for name in random.sample(["side", "car"], random.randrange(3))
    ]
    containers = [engine_patch, *others]
    random.shuffle(containers)
    return containers


def random_env(random: Random, *, may_delete: bool = True) -> list[Json]:
    variables: list[Json] = [
        {"name": name, "value": str(random.randrange(9))}
        for name in random.sample(["HF_HOME", "A", "B", "C"], random.randrange(1, 5))
    ]
    if may_delete and random.random() < 0.3:
        variables.append({"name": random.choice(["HF_HOME", "Z"]), "$patch": "delete"})
    return variables


def random_volumes(random: Random) -> list[Json]:
    volumes: list[Json] = [
        {"name": name, "emptyDir": random.choice([{}, {"sizeLimit": "1Gi"}, {"medium": "Memory"}])}
        for name in random.sample(["models", "shm", "x", "y"], random.randrange(1, 5))
    ]
    if random.random() < 0.3:
        volumes[0] |= {"$retainKeys": ["name", "emptyDir"]}
    return volumes


def random_map(random: Random) -> Json:
    """Without null in a map that replaces: the API server stores empty text for it, we nothing."""
    directive = random.choice([{}, {"$patch": "replace"}, {"$patch": "delete"}])
    choices = ["1", "2", *([] if directive else [None])]
    return {key: random.choice(choices) for key in random.sample("abc", 2)} | directive
