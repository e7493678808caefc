"""A platform engineer's story, on containers: each test goes on where the one before it ended.

helm install, a real model served from six lines, scaled, changed and re-routed under load without
a failed request; split and grouped services; a shared router; failures; upgrade and uninstall.
"""

from __future__ import annotations

import json

import pytest

from kvoy_cluster.waiting import wait_for
from kvoy_e2e.platform import BARE_NODE, CHART, NAMESPACE, SYSTEM, Platform

pytestmark = pytest.mark.slow

URL = "http://smol.demo.svc/v1"
MODEL = "smollm2"

SMOL = """
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata: {name: smol}
spec:
  model: {uri: pvc://models/smollm2-135m-instruct, name: smollm2}
  resources: {requests: {cpu: 100m}, limits: {cpu: 1}}
"""

SPLIT = """
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata: {name: split}
spec:
  model: {uri: hf://example/split}
  engine: {kind: sim}
  replicas: 2
  prefill: {replicas: 1}
  router: {replicas: 1}
"""

GROUPS = """
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata: {name: wide}
spec:
  model: {uri: hf://example/wide}
  engine: {kind: sim}
  replicas: 2
  nodes: 2
  router: {replicas: 1}
"""

SHARED = """
apiVersion: kvoy.dev/v1alpha1
kind: LLMRouter
metadata: {name: shared}
spec:
  replicas: 1
---
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata: {name: alpha}
spec:
  model: {uri: hf://example/alpha, name: alpha}
  engine: {kind: sim}
  router: {ref: shared}
---
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata: {name: beta}
spec:
  model: {uri: hf://example/beta, name: beta}
  engine: {kind: sim}
  router: {ref: shared}
"""

ALL = [
    *(("LLMService", name) for name in ("smol", "split", "wide", "alpha", "beta")),
    ("LLMRouter", "shared"),
]

LONG_QUESTION = (
    "I have a garden with a small pond, three old apple trees, a hedge of hornbeam, and a wooden "
    "shed in which hedgehogs spend the winter. In spring the frogs come, in summer dragonflies. "
    "Please tell me, in a few words, which of these animals I should think of first, and why."
)


def engine_uids(platform: Platform, service: str) -> set[str]:
    pods = platform.all_of("pods", f"kvoy.dev/service={service},kvoy.dev/component=engine")
    return {pod["metadata"]["uid"] for pod in pods}


def pool(platform: Platform, service: str, name: str = "serving") -> dict[str, object]:
    pools = platform.get("llm", service)["status"]["pools"]
    found: dict[str, object] = next(entry for entry in pools if entry["name"] == name)
    return found


@pytest.fixture(autouse=True)
def _the_story_so_far(request: pytest.FixtureRequest) -> None:
    """A test whose predecessor failed has nothing to go on with."""
    if request.session.stash.get(_BROKEN, False):
        pytest.fail("an earlier part of the story failed")


_BROKEN = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def _a_failure_ends_the_story(request: pytest.FixtureRequest, _the_story_so_far: None) -> object:
    before = request.session.testsfailed
    yield
    if request.session.testsfailed > before:
        request.session.stash[_BROKEN] = True


def test_helm_installs_the_platform(platform: Platform) -> None:
    platform.install()

    deployment = platform.get("deployment", "kvoy-operator", SYSTEM)
    assert deployment["status"]["readyReplicas"] == 2
    platform.helm("test", "kvoy", "--namespace", SYSTEM, "--timeout", "2m")


def test_six_lines_serve_a_real_model(platform: Platform) -> None:
    assert len(SMOL.strip().splitlines()) <= 6

    platform.apply(SMOL)

    platform.wait_until_settled("smol", limit_s=300)
    assert platform.get("llm", "smol")["status"]["url"] == URL


def test_the_official_client_chats_and_the_second_turn_is_cached(platform: Platform) -> None:
    report = platform.chat(URL, MODEL, LONG_QUESTION, "And second?")

    first, second = report["answers"]
    assert report["models"] == [MODEL]
    assert first["text"]
    assert second["text"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= 64


def test_kubectl_scale_makes_three(platform: Platform) -> None:
    before = engine_uids(platform, "smol")

    platform.kubectl("scale", "-n", NAMESPACE, "llm/smol", "--replicas=3")

    platform.wait_until_settled("smol", limit_s=300)
    assert pool(platform, "smol")["ready"] == 3
    assert before < engine_uids(platform, "smol")


def test_a_rolling_update_under_load_fails_no_request(platform: Platform) -> None:
    before = engine_uids(platform, "smol")
    load = platform.load(URL, MODEL)

    platform.kubectl(
        *("patch", "-n", NAMESPACE, "llm/smol", "--type=merge", "-p"),
        json.dumps({"spec": {"engine": {"env": [{"name": "GREETING", "value": "hello"}]}}}),
    )
    platform.wait_until_settled("smol", limit_s=600)

    report = load.finish()
    assert report["failures"] == []
    assert report["completed"] >= 5
    wait_for(lambda: not before & engine_uids(platform, "smol"), "the old engines are gone", 180)


def test_a_router_rollout_under_load_drains_its_streams(platform: Platform) -> None:
    engines = engine_uids(platform, "smol")
    load = platform.load(URL, MODEL)

    template = {"metadata": {"annotations": {"example.com/rolled": "1"}}}
    platform.kubectl(
        *("patch", "-n", NAMESPACE, "llm/smol", "--type=merge", "-p"),
        json.dumps({"spec": {"router": {"podTemplate": template}}}),
    )
    platform.kubectl(
        "rollout", "status", "-n", NAMESPACE, "deployment/smol-router", "--timeout=180s"
    )
    platform.wait_until_settled("smol")
    old = "kvoy.dev/service=smol,kvoy.dev/component=router"
    wait_for(
        lambda: (
            not [p for p in platform.all_of("pods", old) if "deletionTimestamp" in p["metadata"]]
        ),
        "old routers are gone",
        180,
    )

    report = load.finish()
    assert report["failures"] == []
    assert engine_uids(platform, "smol") == engines


def test_a_split_service_has_two_pools_of_one_revision(platform: Platform) -> None:
    platform.kubectl("uncordon", BARE_NODE)
    platform.apply(SPLIT)

    platform.wait_until_settled("split")
    pods = platform.all_of("pods", "kvoy.dev/service=split,kvoy.dev/component=engine")
    by_pool = {
        name: [p for p in pods if p["metadata"]["labels"]["kvoy.dev/pool"] == name]
        for name in ("serving", "prefill")
    }
    assert {name: len(members) for name, members in by_pool.items()} == {"serving": 2, "prefill": 1}
    assert len({pod["metadata"]["labels"]["kvoy.dev/revision"] for pod in pods}) == 1
    assert pool(platform, "split", "prefill")["ready"] == 1
    assert platform.chat("http://split.demo.svc/v1", "split", "Hello")["answers"][0]["text"]


def test_two_groups_of_two_nodes_serve(platform: Platform) -> None:
    platform.apply(GROUPS)

    platform.wait_until_settled("wide")
    pods = platform.all_of("pods", "kvoy.dev/service=wide,kvoy.dev/component=engine")
    assert len(pods) == 4
    assert pool(platform, "wide")["ready"] == 2
    assert platform.chat("http://wide.demo.svc/v1", "wide", "Hello")["answers"][0]["text"]


def test_a_shared_router_serves_both_models(platform: Platform) -> None:
    platform.apply(SHARED)

    platform.wait_until_settled("alpha")
    platform.wait_until_settled("beta")
    platform.wait_until_settled("shared", kind="llmrouter")
    url = "http://shared.demo.svc/v1"
    report = platform.chat(url, "alpha", "Hello")
    assert {"alpha", "beta"} <= set(report["models"])
    assert report["answers"][0]["text"]
    assert platform.chat(url, "beta", "Hello")["answers"][0]["text"]
    assert not platform.all_of("deployments", "kvoy.dev/service=alpha,kvoy.dev/component=router")


def test_a_killed_engine_is_replaced_and_only_its_own_streams_suffer(platform: Platform) -> None:
    pods = platform.all_of("pods", "kvoy.dev/service=alpha,kvoy.dev/component=engine")
    victim = pods[0]["metadata"]["name"]

    platform.kubectl("delete", "pod", "-n", NAMESPACE, victim, "--grace-period=0", "--force")

    wait_for(lambda: platform.condition("alpha", "Ready").get("status") != "True", "noticed", 60)
    platform.wait_until_settled("alpha")
    assert platform.chat("http://shared.demo.svc/v1", "alpha", "Hello")["answers"][0]["text"]


def test_a_group_that_loses_a_worker_comes_back_whole(platform: Platform) -> None:
    selector = "kvoy.dev/service=wide,leaderworkerset.sigs.k8s.io/group-index=0"
    group = {
        pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in platform.all_of("pods", selector)
    }
    worker = max(group, key=len)

    platform.kubectl("delete", "pod", "-n", NAMESPACE, worker, "--grace-period=0", "--force")

    def is_new() -> bool:
        uids = {pod["metadata"]["uid"] for pod in platform.all_of("pods", selector)}
        return len(uids) == 2 and not uids & set(group.values())

    wait_for(is_new, "leader and worker are made anew", 180)
    platform.wait_until_settled("wide")
    assert pool(platform, "wide")["ready"] == 2


def test_a_service_deleted_under_load_finishes_its_requests(platform: Platform) -> None:
    load = platform.load("http://shared.demo.svc/v1", "beta", concurrency=2)

    platform.kubectl("delete", "-n", NAMESPACE, "llm/alpha")

    wait_for(
        lambda: not platform.all_of("pods", "kvoy.dev/service=alpha"), "alpha's pods are gone", 120
    )
    assert load.finish()["failures"] == []


def test_the_operators_have_written_one_line_for_each_transition(platform: Platform) -> None:
    lines = sorted(
        (json.loads(line) for line in platform.operator_log().splitlines()),
        key=lambda line: float(line["time"]),
    )

    told = [line for line in lines if line["event"] == "transition"]
    about_themselves = [line["event"] for line in lines if line["event"] != "transition"]
    assert set(about_themselves) <= {"leads", "follows", "master secret made"}, lines
    assert len(about_themselves) == len(set(about_themselves))
    last: dict[tuple[str, str], str] = {}
    for line in told:
        resource, reason = line["resource"], line["reason"]
        # What turns: a condition that holds or not; else the phase of a rollout, or a failure.
        turning = reason.replace("Not", "") if reason.endswith("Ready") else "phase"
        assert last.get((resource, turning)) != reason, told
        last[resource, turning] = reason
    resources = {f"{kind}/{NAMESPACE}/{name}" for kind, name in ALL}
    assert {line["resource"] for line in told} == resources


def test_helm_upgrade_changes_no_engine(platform: Platform) -> None:
    before = {name: engine_uids(platform, name) for name in ("smol", "split", "wide", "beta")}

    platform.helm(
        *("upgrade", "kvoy", str(CHART), "--namespace", SYSTEM, "--wait", "--timeout", "3m"),
        *("--set", "operator.podAnnotations.example\\.com/upgraded=yes"),
    )

    platform.wait_until_settled("smol")
    assert {name: engine_uids(platform, name) for name in before} == before


def test_helm_uninstall_leaves_the_services_serving(platform: Platform) -> None:
    platform.uninstall()

    assert "smol" in platform.kubectl("get", "llm", "-n", NAMESPACE)
    assert platform.chat(URL, MODEL, "Hello")["answers"][0]["text"]
