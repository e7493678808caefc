"""What lies behind the API server and does not work: a condition once it has lasted."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from kvoy_operator.api import Api
from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.children import Children
from kvoy_operator.cluster import Cluster
from kvoy_operator.events import EventPost
from kvoy_operator.kinds import LLM_SERVICE
from kvoy_operator.metrics import Metrics
from kvoy_operator.reconcile_service import ServiceStory
from kvoy_operator.record import Key, record_of
from kvoy_operator.render_testing import make_options, service_body
from kvoy_operator.report import Reporter
from kvoy_operator.store import Store

WEBHOOK = 'Internal error occurred: failed calling webhook "w.example.com": connection refused'
TOO_LARGE = (
    "rpc error: code = ResourceExhausted desc = trying to send message larger than max (2167400 "
    "vs. 2097152)"
)


class _Server:
    """Takes everything but Deployments, which `fault` keeps it from."""

    def __init__(self, fault: ApiRefusal) -> None:
        self.fault: ApiRefusal | None = fault
        self.status: dict[str, Any] = {}
        self._version = 100

    async def request(self, method: str, path: str, **options: Any) -> Any:
        if method == "GET" or (options.get("params") or {}).get("dryRun"):
            raise ApiRefusal(404, "NotFound", "not found")
        if "/deployments/" in path and self.fault is not None:
            raise self.fault
        body = options["body"]
        if path.endswith("/status"):
            self.status = body["status"]
        self._version += 1
        version = {"resourceVersion": str(self._version)}
        return {**body, "metadata": {"uid": path, **body["metadata"], **version}}

    async def raw(self, method: str, path: str, **options: Any) -> bytes:
        return msgspec.json.encode(await self.request(method, path, **options))

    def condition(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(c for c in self.status["conditions"] if c["type"] == name)
        return found


class _World:
    def __init__(self, fault: ApiRefusal) -> None:
        self.now_s = 1_800_000_000.0
        self.server = _Server(fault)
        store = Store()
        body = service_body()
        body["metadata"] |= {"resourceVersion": "1", "creationTimestamp": "2027-01-15T08:00:00Z"}
        record = record_of(LLM_SERVICE, body)
        store.put(record)
        self.key = Key(*record.ref)
        cluster = Cluster(cast(Api, self.server), store.put_own, store.remove)
        reporter = Reporter(cluster, EventPost(cast(Api, self.server), "test"))
        self._story = ServiceStory(
            store,
            cluster,
            Children(cluster),
            reporter,
            make_options(),
            Metrics(),
            lambda: self.now_s,
        )

    async def tell(self) -> float | None:
        return await self._story.reconcile(self.key)


async def test_a_fault_behind_the_server_is_told_once_it_has_lasted() -> None:
    world = _World(ApiRefusal(500, "InternalError", WEBHOOK))

    with pytest.raises(ApiRefusal):
        await world.tell()
    assert world.server.status == {}
    world.now_s += 30.0
    again_s = await world.tell()

    assert again_s is not None
    for name in ("Accepted", "Ready"):
        told = world.server.condition(name)
        assert (told["status"], told["reason"]) == ("False", "ApiServerFault")
        assert "w.example.com" in told["message"]


async def test_what_is_too_large_is_the_users_to_mend() -> None:
    world = _World(ApiRefusal(500, "", TOO_LARGE))

    await world.tell()

    told = world.server.condition("Accepted")
    assert told["reason"] == "InvalidSpec"
    assert "podTemplate" in told["message"]


@pytest.mark.parametrize("words", [TOO_LARGE, "etcdserver: request is too large"])
def test_limits_of_etcd_are_no_faults_of_the_server(words: str) -> None:
    refusal = ApiRefusal(500, "", words)

    assert refusal.is_invalid
    assert not refusal.is_server_fault
