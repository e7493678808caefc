"""The election in virtual time, over a Lease that refuses what the API server would refuse."""

from __future__ import annotations

import asyncio
import copy
from typing import Any, cast

import pytest

from kvoy_operated.virtual_time import run_virtually
from kvoy_operator.api import Api
from kvoy_operator.api_errors import ApiRefusal, ApiUnreachable
from kvoy_operator.leader import LeaderElection, LeadershipLost, LeaseTimes


class _LeaseServer:
    """One Lease, with resourceVersions; can be out of reach of some."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self._version = 0

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])

    def handle(self, method: str, body: dict[str, Any] | None) -> dict[str, Any]:
        if self.lease is None and method != "POST":
            raise ApiRefusal(404, "NotFound", "no lease")
        if method == "POST" and self.lease is not None:
            raise ApiRefusal(409, "AlreadyExists", "there is one")
        if method != "GET":
            assert body is not None
            given = body["metadata"].get("resourceVersion")
            if method == "PUT" and given != str(self._version):
                raise ApiRefusal(409, "Conflict", "stale")
            self._version += 1
            self.lease = copy.deepcopy(body)
            self.lease["metadata"]["resourceVersion"] = str(self._version)
        return copy.deepcopy(self.lease or {})


class _Client:
    """One operator's way to the server."""

    def __init__(self, server: _LeaseServer) -> None:
        self._server = server
        self.is_cut = False
        self.answer_delay_s = 0.0
        """After the server has carried it out."""

    async def request(
        self, method: str, path: str, *, body: Any = None, timeout_s: float | None = None
    ) -> Any:
        assert path.startswith("/apis/coordination.k8s.io/v1/namespaces/home/leases")
        if self.is_cut:
            await asyncio.sleep(timeout_s or 1.0)
            raise ApiUnreachable("cut")
        await asyncio.sleep(0.01)
        answer = self._server.handle(method, body)
        await asyncio.sleep(self.answer_delay_s)
        return answer


def _contender(server: _LeaseServer, name: str) -> tuple[_Client, LeaderElection]:
    client = _Client(server)
    return client, LeaderElection(cast(Api, client), "home", "kvoy-operator", name)


def test_one_of_two_leads_and_the_other_one_waits_as_long_as_it_renews() -> None:
    server = _LeaseServer()
    (_, first), (_, second) = _contender(server, "a"), _contender(server, "b")

    async def main() -> None:
        await first.acquire()
        holding = asyncio.create_task(first.hold())
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(600)
        assert not waiting.done()
        assert not holding.done()
        for task in (holding, waiting):
            task.cancel()

    run_virtually(main())

    assert server.holder == "a"


def test_a_lease_is_released_although_nobody_heard_of_its_last_renewal() -> None:
    server = _LeaseServer()
    client, leader = _contender(server, "a")

    async def main() -> None:
        await leader.acquire()
        client.answer_delay_s = 0.5
        holding = asyncio.create_task(leader.hold())
        await asyncio.sleep(LeaseTimes().retry_s + 0.1)
        renewed = copy.deepcopy(server.lease)
        holding.cancel()
        await asyncio.wait([holding])
        assert renewed is not None
        assert int(renewed["metadata"]["resourceVersion"]) == 2
        await leader.release()

    run_virtually(main())

    assert server.holder == ""


@pytest.mark.parametrize("lead_s", [0.0, 0.3, 1.0, 1.7, 7.9, 59.99])
def test_a_leader_that_is_killed_is_followed_within_fifteen_seconds(lead_s: float) -> None:
    server = _LeaseServer()
    (_, first), (_, second) = _contender(server, "a"), _contender(server, "b")
    killed_s: list[float] = []
    took_s: list[float] = []

    async def main() -> None:
        await first.acquire()
        holding, waiting = (asyncio.create_task(each) for each in (first.hold(), second.acquire()))
        await asyncio.sleep(lead_s)
        holding.cancel()  # and releases nothing: its process was killed
        killed_s.append(asyncio.get_running_loop().time())
        await waiting
        took_s.append(asyncio.get_running_loop().time())

    run_virtually(main())

    times = LeaseTimes()
    assert server.holder == "b"
    # Not before the lease has ended, which the last renewal may have begun some time ago.
    assert took_s[0] - killed_s[0] >= times.lease_s - times.retry_s - 0.1
    assert took_s[0] - killed_s[0] <= times.retry_s + times.lease_s + 0.1


def test_a_leader_whose_process_was_stopped_does_not_act_when_it_wakes() -> None:
    server = _LeaseServer()
    (_, first), (_, second) = _contender(server, "a"), _contender(server, "b")

    async def main() -> None:
        await first.acquire()
        assert first.may_act
        # Nothing of it runs, not even what would notice that it has lost.
        await second.acquire()
        assert second.may_act
        assert not first.may_act

    run_virtually(main())


def test_a_leader_that_cannot_renew_gives_up_before_another_one_may_begin() -> None:
    server = _LeaseServer()
    (client, first), (_, second) = _contender(server, "a"), _contender(server, "b")
    times: dict[str, float] = {}

    async def hold() -> None:
        with pytest.raises(LeadershipLost):
            await first.hold()
        times["gave up"] = asyncio.get_running_loop().time()

    async def main() -> None:
        await first.acquire()
        holding = asyncio.create_task(hold())
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(60)
        client.is_cut = True
        await waiting
        times["took over"] = asyncio.get_running_loop().time()
        await holding

    run_virtually(main())

    # A call that was sent at the last moment has time to be carried out.
    assert times["took over"] - times["gave up"] >= 2.0
    assert not first.may_act


def test_a_released_lease_is_taken_at_the_next_look() -> None:
    server = _LeaseServer()
    (_, first), (_, second) = _contender(server, "a"), _contender(server, "b")
    took_s: list[float] = []

    async def main() -> None:
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(60)
        await first.release()
        await waiting
        took_s.append(asyncio.get_running_loop().time())

    run_virtually(main())

    assert server.holder == "b"
    assert took_s[0] - 60 <= 2.5


def test_a_leader_whose_lease_somebody_took_stops_at_once() -> None:
    server = _LeaseServer()
    _, first = _contender(server, "a")

    async def main() -> None:
        await first.acquire()
        assert server.lease is not None
        stolen = copy.deepcopy(server.lease)
        stolen["spec"]["holderIdentity"] = "thief"
        server.handle("PUT", stolen)
        with pytest.raises(LeadershipLost, match="thief"):
            await first.hold()

    run_virtually(main())

    assert server.holder == "thief"


def test_a_short_cut_is_survived() -> None:
    server = _LeaseServer()
    client, first = _contender(server, "a")

    async def main() -> None:
        await first.acquire()
        holding = asyncio.create_task(first.hold())
        await asyncio.sleep(20)
        client.is_cut = True
        await asyncio.sleep(5)
        client.is_cut = False
        await asyncio.sleep(60)
        assert not holding.done()
        holding.cancel()

    run_virtually(main())

    assert server.holder == "a"
