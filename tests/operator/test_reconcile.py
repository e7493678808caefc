"""The frame around a reconcile, the writes to children, and what a resync finds, over an API server
that is played by a few lines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from kvoy_operated.virtual_time import run_virtually
from kvoy_operator.acceptance import Refusal
from kvoy_operator.api import Api
from kvoy_operator.api_errors import ApiFailure, ApiRefusal, ApiUnreachable
from kvoy_operator.children import Children
from kvoy_operator.cluster import Cluster
from kvoy_operator.connectivity import Connectivity
from kvoy_operator.kinds import DEPLOYMENT, LLM_SERVICE, SECRET, SERVICE
from kvoy_operator.metrics import Metrics
from kvoy_operator.observed import Observed
from kvoy_operator.ownership import Ownership, ownership
from kvoy_operator.reconcile import Gone, Reconciler
from kvoy_operator.record import Key, Ref, record_of
from kvoy_operator.refusals import refusal_by
from kvoy_operator.render_testing import make_options, make_service, service_body
from kvoy_operator.resync import Resync
from kvoy_operator.rollout_state import PoolRevision
from kvoy_operator.rollout_values import Phase, RolloutStep
from kvoy_operator.store import Store
from kvoy_operator.watch_health import STALLED_AFTER_S, WatchHealth
from kvoy_operator.work_queue import RetryLater
from kvoy_operator.workloads import Workloads

_KEY = Key("LLMService", "team", "qwen")
_OWNER: dict[str, Any] = {
    "apiVersion": "kvoy.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "qwen", "namespace": "team", "uid": "owner", "resourceVersion": "1"},
}


class _Server:
    """Objects by URL path; records every call, and refuses when told to."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str]] = []
        self.refusals: dict[tuple[str, str], ApiFailure] = {}
        self._version = 100

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        before = self.objects.get(path, {"metadata": {"uid": f"uid-{self._version}"}})
        metadata = {
            "uid": before["metadata"]["uid"],
            **body["metadata"],
            "resourceVersion": str(self._version),
        }
        self.objects[path] = {**body, "metadata": metadata}
        return self.objects[path]

    async def request(self, method: str, path: str, **options: Any) -> Any:
        self.calls.append((method, path))
        if refusal := self.refusals.get((method, path)):
            raise refusal
        is_change = method == "PATCH" and "dryRun" not in (options.get("params") or {})
        if is_change:
            version = options["body"]["metadata"].get("resourceVersion")
            if version and path in self.objects:
                raise ApiRefusal(409, "Conflict", "the object has been modified")
            return self.put(path, options["body"])
        if path not in self.objects:
            raise ApiRefusal(404, "NotFound", f"{path} not found")
        if method == "DELETE":
            del self.objects[path]
            return {"kind": "Status"}
        return self.objects[path]

    async def raw(self, method: str, path: str, **options: Any) -> bytes:
        if method == "PATCH":
            return msgspec.json.encode(await self.request(method, path, **options))
        self.calls.append((method, path))
        inside = [body for name, body in self.objects.items() if name.startswith(f"{path}/")]
        items = [{"metadata": body["metadata"]} for body in inside]
        listing = {"metadata": {"resourceVersion": str(self._version)}, "items": items or None}
        return json.dumps(listing).encode()

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] != "GET"]

    @property
    def secrets(self) -> list[dict[str, Any]]:
        return [body for body in self.objects.values() if body["kind"] == "Secret"]


def _service(name: str = "qwen", **metadata: Any) -> dict[str, Any]:
    owner = {**_OWNER["metadata"], "kind": "LLMService", "apiVersion": "kvoy.dev/v1alpha1"}
    reference = {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "team",
            "labels": {
                "app.kubernetes.io/managed-by": "kvoy-operator",
                "kvoy.dev/service": "qwen",
            },
            "ownerReferences": [{**reference, "controller": True, "blockOwnerDeletion": True}],
            **metadata,
        },
        "spec": {"ports": [{"port": 80, "protocol": "TCP"}]},
    }


def _children(server: _Server, store: Store) -> Children:
    return Children(Cluster(cast(Api, server), store.put_own, store.remove))


async def _settle(server: _Server, store: Store, *wanted: dict[str, Any]) -> tuple[Refusal, ...]:
    outcome = await _children(server, store).settle(_OWNER, wanted, store.observed(_KEY), ())
    return outcome.refusals


async def test_a_child_that_is_as_it_should_be_is_not_written_again() -> None:
    server, store = _Server(), Store()

    await _settle(server, store, _service())
    assert len(server.writes) == 1
    await _settle(server, store, _service())

    assert len(server.writes) == 1


async def test_a_strangers_object_is_named_and_not_touched() -> None:
    server, store = _Server(), Store()
    path = SERVICE.path("team", "qwen")
    theirs = server.put(path, _service(ownerReferences=[], labels={}))

    (refusal,) = await _settle(server, store, _service())

    assert refusal.reason == "NameClash"
    assert "Service qwen" in refusal.message
    assert server.objects[path] is theirs


def _secret(**metadata: Any) -> dict[str, Any]:
    body = {
        **_service("qwen-internal", **metadata),
        "kind": "Secret",
        "data": {"secret": "b3Vycw=="},
    }
    del body["spec"]
    return body


async def test_a_strangers_secret_is_not_touched_even_where_no_field_is_in_dispute() -> None:
    server, store = _Server(), Store()
    theirs = _secret(ownerReferences=[], labels={}) | {"data": {"other": "dGhlaXJz"}}
    server.put(SECRET.path("team", "qwen-internal"), theirs)

    (refusal,) = await _settle(server, store, _secret())

    assert refusal.reason == "NameClash"
    assert "Secret qwen-internal" in refusal.message
    assert [each["data"] for each in server.secrets] == [{"other": "dGhlaXJz"}]


async def test_a_secret_of_an_llmrouter_of_the_same_name_is_not_taken_over() -> None:
    server, store = _Server(), Store()
    theirs = _secret()
    theirs["metadata"]["ownerReferences"][0] |= {"kind": "LLMRouter", "uid": "router"}
    server.put(SECRET.path("team", "qwen-internal"), theirs)

    (refusal,) = await _settle(server, store, _secret())

    assert "belongs to LLMRouter qwen" in refusal.message
    (kept,) = server.secrets
    assert kept["metadata"]["ownerReferences"][0]["uid"] == "router"


@pytest.mark.parametrize("change", [{}, {"ownerReferences": []}])
async def test_a_secret_of_ours_that_was_changed_is_repaired_once(change: dict[str, Any]) -> None:
    server, store = _Server(), Store()
    changed = _secret(**change) | {"data": {"secret": "ZHJpZnQ="}}
    server.put(SECRET.path("team", "qwen-internal"), changed)

    # Each time by another process.
    refusals = [await _settle(server, store, _secret(), _service()) for _ in range(3)]

    assert refusals == [()] * 3
    assert [each["data"] for each in server.secrets] == [{"secret": "b3Vycw=="}]
    # Of the Secret a try to create it, a look and a write; and the Service.
    assert len(server.writes) == 4


async def test_secrets_are_applied_again_when_they_change_or_their_mark_goes() -> None:
    server, store = _Server(), Store()
    await _settle(server, store, _secret(), _service())
    num_writes = len(server.writes)

    await _settle(server, store, _secret() | {"data": {"secret": "bmV3"}}, _service())

    assert [each["data"] for each in server.secrets] == [{"secret": "bmV3"}]
    assert len(server.writes) == num_writes + 3  # a look, the Secret, and the Service's mark

    path = SERVICE.path("team", "qwen")
    bare = dict(server.objects[path]["metadata"]["annotations"])
    bare.pop("kvoy.dev/secrets")
    unmarked = server.put(path, _service(annotations=bare))
    store.put(record_of(SERVICE, unmarked))
    server.objects.pop(SECRET.path("team", "qwen-internal"))
    await _settle(server, store, _secret() | {"data": {"secret": "bmV3"}}, _service())

    assert [each["data"] for each in server.secrets] == [{"secret": "bmV3"}]


async def test_secrets_that_could_not_be_applied_are_not_marked_as_if_they_were() -> None:
    server, store = _Server(), Store()
    theirs = _secret(ownerReferences=[], labels={})
    path = SECRET.path("team", "qwen-internal")
    server.put(path, theirs)

    (refusal,) = await _settle(server, store, _secret(), _service())
    assert refusal.reason == "NameClash"
    server.objects.pop(path)

    assert await _settle(server, store, _secret(), _service()) == ()
    assert path in server.objects


async def test_the_secret_of_a_router_goes_with_it_and_a_strangers_stays() -> None:
    for is_ours in (True, False):
        server, store = _Server(), Store()
        fleet = _secret()
        fleet["metadata"]["name"] = "qwen-fleet"
        if not is_ours:
            fleet["metadata"] |= {"labels": {}, "ownerReferences": []}
        secret_path = SECRET.path("team", "qwen-fleet")
        server.put(secret_path, fleet)
        router = {**_service("qwen-router"), "kind": "Deployment", "apiVersion": "apps/v1"}
        await _settle(server, store, router)

        await _settle(server, store, _service())

        assert DEPLOYMENT.path("team", "qwen-router") not in server.objects
        assert (secret_path not in server.objects) is is_ours


async def test_a_secret_of_a_namesake_that_is_gone_is_waited_for() -> None:
    server, store = _Server(), Store()
    body = server.put(SECRET.path("team", "qwen-internal"), _secret())
    body["metadata"]["ownerReferences"][0]["uid"] = "earlier"

    outcome = await _children(server, store).settle(_OWNER, [_secret()], store.observed(_KEY), ())

    assert outcome.requeue_after_s is not None
    assert outcome.refusals == ()


async def test_who_leads_no_more_writes_nothing() -> None:
    server, store = _Server(), Store()
    cluster = Cluster(cast(Api, server), store.put_own, store.remove, may_act=lambda: False)
    live = {**_service(), "metadata": {**_service()["metadata"], "uid": "1"}}

    for write in (
        cluster.create(_service()),
        cluster.apply(_service()),
        cluster.scale(DEPLOYMENT, "team", "qwen", "1", 2),
        cluster.merge_metadata(live, {"labels": {}}),
        cluster.delete(SERVICE, "team", "qwen", "1"),
        cluster.patch_status({**_OWNER, "kind": "LLMService"}, {}),
    ):
        with pytest.raises(ApiUnreachable, match="leads no more"):
            await write

    assert server.writes == []


async def test_one_refused_child_does_not_hold_up_the_others() -> None:
    server, store = _Server(), Store()
    first, second = SERVICE.path("team", "qwen"), SERVICE.path("team", "qwen-engines")
    server.refusals["PATCH", first] = ApiRefusal(422, "Invalid", "spec.ports: too odd")

    (refusal,) = await _settle(server, store, _service(), _service("qwen-engines"))

    assert refusal.reason == "InvalidSpec"
    assert refusal.message.startswith("Service qwen: spec.ports: too odd")
    assert second in server.objects


async def test_what_may_pass_is_raised_after_the_others_were_applied() -> None:
    server, store = _Server(), Store()
    server.refusals["PATCH", SERVICE.path("team", "qwen")] = ApiRefusal(429, "", "later")

    with pytest.raises(ApiRefusal, match="later"):
        await _settle(server, store, _service(), _service("qwen-engines"))

    assert SERVICE.path("team", "qwen-engines") in server.objects


async def test_children_that_are_no_longer_wanted_go_and_strangers_stay() -> None:
    server, store = _Server(), Store()
    odd: dict[str, dict[str, Any]] = {"old": {}, "theirs": {"ownerReferences": []}}
    for name, metadata in odd.items():
        body = server.put(SERVICE.path("team", name), _service(name, **metadata))
        store.put(record_of(SERVICE, body))

    await _settle(server, store, _service())

    assert [path for method, path in server.writes if method == "DELETE"] == [
        SERVICE.path("team", "old")
    ]


@pytest.mark.parametrize(
    ("metadata", "whose"),
    [
        ({}, Ownership.OURS),
        ({"ownerReferences": []}, Ownership.ORPHAN),
        ({"ownerReferences": [], "labels": {}}, Ownership.STRANGER),
        ({"ownerReferences": [], "labels": {"kvoy.dev/service": "qwen"}}, Ownership.STRANGER),
    ],
)
def test_whose_a_child_is(metadata: dict[str, Any], whose: Ownership) -> None:
    assert ownership(_service(**metadata), _OWNER) is whose


def test_a_child_of_a_namesake_that_is_gone_is_on_its_way_out() -> None:
    child = _service()
    child["metadata"]["ownerReferences"][0]["uid"] = "earlier"

    assert ownership(child, _OWNER) is Ownership.DYING


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (ApiRefusal(403, "Forbidden", "exceeded quota: pods"), "QuotaExceeded"),
        (ApiRefusal(403, "Forbidden", "admission webhook denied it"), "Forbidden"),
        (ApiRefusal(422, "Invalid", "spec: no"), "InvalidSpec"),
        (ApiRefusal(409, "Conflict", "again"), None),
        (ApiRefusal(500, "InternalError", "later"), None),
        (ApiRefusal(403, "Forbidden", "", causes=("NamespaceTerminating",)), None),
    ],
)
def test_only_refusals_that_stay_become_conditions(refused: ApiRefusal, reason: str | None) -> None:
    found = refusal_by(refused, _service())

    assert (found.reason if found else None) == reason


def _reconciler(story: Callable[[Key], Awaitable[float | None]], metrics: Metrics) -> Reconciler:
    return Reconciler({"LLMService": story}, metrics, resync_s=480.0)


def _results(metrics: Metrics, result: str) -> float:
    labels = {"kind": "LLMService", "result": result}
    return metrics.registry.get_sample_value("kvoy_operator_reconcile_total", labels) or 0.0


async def test_a_key_comes_back_when_its_story_asks_and_at_the_latest_for_a_resync() -> None:
    delays_s = iter([5.0, None])

    async def story(_: Key) -> float | None:
        return next(delays_s)

    metrics = Metrics()
    reconcile = _reconciler(story, metrics)

    assert await reconcile(_KEY) == 5.0
    assert 432.0 <= (await reconcile(_KEY) or 0) <= 528.0
    assert _results(metrics, "ok") == 2.0


async def test_a_missing_right_is_told_once_and_only_when_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(_: Key) -> float | None:
        raise ApiRefusal(403, "Forbidden", 'User "operator" cannot patch resource "services"')

    now_s = 100.0
    reconcile = Reconciler({"LLMService": story}, Metrics(), 480.0, clock=lambda: now_s)

    for at_s, num_lines in ((100.0, 0), (110.0, 0), (120.0, 1), (130.0, 1)):
        now_s = at_s
        with pytest.raises(RetryLater):
            await reconcile(_KEY)
        assert len([each for each in caplog.records if each.levelname == "WARNING"]) == num_lines


async def test_a_resource_that_is_gone_does_not_come_back() -> None:
    async def story(_: Key) -> float | None:
        raise Gone

    assert await _reconciler(story, Metrics())(_KEY) is None


async def test_a_failure_is_told_once_until_it_is_another_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    messages = iter(["no", "no", "never", ""])

    async def story(_: Key) -> float | None:
        if message := next(messages):
            raise ApiRefusal(500, "", message)
        return None

    caplog.set_level(logging.INFO)
    metrics = Metrics()
    reconcile = _reconciler(story, metrics)

    for _ in range(3):
        with pytest.raises(RetryLater):
            await reconcile(_KEY)
    await reconcile(_KEY)

    said = [record.getMessage() for record in caplog.records]
    assert said == ["reconcile fails", "reconcile fails", "reconcile works again"]
    assert _results(metrics, "retry") == 3.0


async def test_the_time_that_the_server_asks_for_is_passed_on() -> None:
    async def story(_: Key) -> float | None:
        raise ApiRefusal(429, "TooManyRequests", "slow down", retry_after_s=17.0)

    with pytest.raises(RetryLater) as raised:
        await _reconciler(story, Metrics())(_KEY)

    assert raised.value.delay_s == 17.0


async def test_a_namespace_that_goes_away_and_an_absent_server_are_no_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures: list[ApiFailure] = [
        ApiRefusal(403, "Forbidden", "", causes=("NamespaceTerminating",)),
        ApiUnreachable("no route"),
        ApiRefusal(409, "Conflict", "somebody was faster"),
    ]

    async def story(_: Key) -> float | None:
        raise failures[0]

    caplog.set_level(logging.INFO)
    reconcile = _reconciler(story, Metrics())

    assert await reconcile(_KEY) is not None
    for _ in range(2):
        failures.pop(0)
        with pytest.raises(RetryLater):
            await reconcile(_KEY)

    assert caplog.records == []


async def test_a_defect_is_counted_and_raised() -> None:
    async def story(_: Key) -> float | None:
        raise ZeroDivisionError

    metrics = Metrics()

    with pytest.raises(ZeroDivisionError):
        await _reconciler(story, metrics)(_KEY)

    assert _results(metrics, "defect") == 1.0


def _resync(server: _Server, store: Store) -> Resync:
    return Resync(
        cast(Api, server),
        store,
        ["team"],
        lambda: [LLM_SERVICE],
        store.put,
        store.remove,
    )


def _custom(name: str) -> dict[str, Any]:
    return {"kind": "LLMService", "metadata": {"name": name, "namespace": "team"}}


async def test_a_resync_finds_what_watches_have_missed() -> None:
    server, store = _Server(), Store()
    for name in ("new", "changed", "same", "gone"):
        path = LLM_SERVICE.path("team", name)
        store_it = name != "new"
        body = server.put(path, _custom(name))
        if store_it:
            store.put(record_of(LLM_SERVICE, body))
    server.put(LLM_SERVICE.path("team", "changed"), {**_custom("changed"), "spec": {"x": 1}})
    del server.objects[LLM_SERVICE.path("team", "gone")]

    num_missed = await _resync(server, store).run_once(patience_s=0)

    assert num_missed == 3
    assert sorted(key.name for key in store.all_keys()) == ["changed", "new", "same"]
    changed = store.body(Ref("LLMService", "team", "changed"))
    assert changed is not None
    assert changed["spec"] == {"x": 1}


def test_a_resync_waits_for_watches_as_long_as_they_bring_something() -> None:
    server, store = _Server(), Store()
    bodies = [server.put(LLM_SERVICE.path("team", name), _custom(name)) for name in "abcd"]

    async def bring_three_slowly() -> None:
        for body in bodies[:3]:
            await asyncio.sleep(8.0)
            store.put(record_of(LLM_SERVICE, body))

    async def resync() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(bring_three_slowly())
            num_missed = await _resync(server, store).run_once(patience_s=10.0)

        assert num_missed == 1

    run_virtually(resync())
    assert server.calls == [
        ("GET", LLM_SERVICE.path("team")),
        ("GET", LLM_SERVICE.path("team", "d")),
    ]


async def test_a_resync_reads_nothing_when_nothing_was_missed() -> None:
    server, store = _Server(), Store()
    body = server.put(LLM_SERVICE.path("team", "qwen"), _custom("qwen"))
    store.put(record_of(LLM_SERVICE, body))

    assert await _resync(server, store).run_once(patience_s=0) == 0
    assert server.calls == [("GET", LLM_SERVICE.path("team"))]


def test_a_watch_without_a_sign_of_life_is_stalled_and_an_answer_wakes_it() -> None:
    now = [0.0]
    health = WatchHealth(lambda: now[0])
    for namespace in ("a", "b"):
        health.expect(SERVICE, namespace)

    now[0] = STALLED_AFTER_S
    health.saw_event(SERVICE, "a")
    now[0] += 1.0
    assert health.stalled() == ["Service"]  # the one in b
    health.saw_answer(SERVICE.path("b"), 403)
    assert health.stalled() == ["Service"]
    health.saw_answer(SERVICE.path("b"), 200)

    assert health.stalled() == []
    assert health.ages_s() == {"Service": 1.0}


def test_an_absent_api_server_is_told_once_and_its_return_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    connectivity = Connectivity()

    for code in (0, 200, 0, 0, 0, 0, 404, 200):
        connectivity.observe_call("GET", "/api", code)

    said = [record.getMessage() for record in caplog.records]
    assert said == ["the API server does not answer", "the API server answers again"]


def test_series_of_a_pool_go_with_the_pool() -> None:
    metrics = Metrics()
    metrics.set_pools(_KEY, {"serving": (3, 2), "prefill": (1, 1)})
    assert b'pool="prefill",service="qwen"} 1.0' in metrics.render()

    metrics.set_pools(_KEY, {"serving": (3, 3)})
    assert b"prefill" not in metrics.render()
    metrics.set_pools(_KEY, {})

    assert b"qwen" not in metrics.render()


async def test_a_workload_that_appears_before_its_creation_is_not_written_over() -> None:
    server, store = _Server(), Store()
    theirs = {"kind": "Deployment", "metadata": {"name": "theirs", "namespace": "default"}}
    server.put(DEPLOYMENT.path("default", "qwen-s-bbbbb"), theirs)
    cluster = Cluster(cast(Api, server), store.put_own, store.remove)
    workloads = Workloads(cluster, Children(cluster), make_options())
    new = PoolRevision("serving", "bbbbb")
    step = RolloutStep(
        replicas={new: 1}, create=(new,), delete=(), phase=Phase.DEPLOYING, message="", current=""
    )

    refusal = await workloads.take(service_body(), make_service(), step, Observed())

    assert refusal is not None
    assert refusal.reason == "NameClash"
    (kept,) = server.objects.values()
    assert kept["metadata"]["name"] == "theirs"
