"""A group of engine processes over loopback: how it comes together, serves and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import httpx
import pytest

from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as rpc
from kvoy_contract.testing_ports import free_port
from kvoy_engine import group_wire
from kvoy_engine.config import EngineConfig
from kvoy_engine.group_worker import GroupWorker
from kvoy_engine.http_server import StartFailed
from kvoy_engine.loading import load_in_group
from kvoy_engine.server import EngineServer, LoadedEngine
from kvoy_engine.testing_server import sim_config

DEADLINE_S = 60.0
BODY = {"model": "sim", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}


@dataclass(slots=True)
class Member:
    server: EngineServer | GroupWorker
    running: asyncio.Task[int]

    async def status_of(self, path: str) -> int:
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            url = f"http://127.0.0.1:{self.server.http_port}{path}"
            return (await client.get(url)).status_code


class Members:
    """Starts processes' insides on this event loop; ends what is left at exit."""

    def __init__(self) -> None:
        self.port = free_port()
        self.all: list[Member] = []

    def settings(self, rank: int, **settings: Any) -> EngineConfig:
        group: dict[str, Any] = {"nnodes": 3, "tensor_parallel_size": 3, "node_rank": rank}
        group |= {"master_addr": "127.0.0.1", "master_port": self.port, "secret": "s"}
        return sim_config(**(group | settings))

    def leader(self, **settings: Any) -> Member:
        config = self.settings(0, **settings)

        async def load() -> LoadedEngine:
            return await load_in_group(config, lambda text: None, server.begin_drain)

        server = EngineServer(config, load)
        return self._start(server)

    def worker(self, rank: int, **settings: Any) -> Member:
        return self._start(GroupWorker(self.settings(rank, **settings)))

    def _start(self, server: EngineServer | GroupWorker) -> Member:
        member = Member(server, asyncio.ensure_future(server.run()))
        self.all.append(member)
        return member

    async def close(self) -> None:
        for member in self.all:
            if not member.running.done():
                member.server.request_drain()
                member.server.request_drain()
        await asyncio.gather(*(member.running for member in self.all), return_exceptions=True)


@pytest.fixture
async def members() -> AsyncIterator[Members]:
    started = Members()
    yield started
    await started.close()


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await check():
                return
            await asyncio.sleep(0.01)


async def is_answered(member: Member, path: str, status: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return await member.status_of(path) == status
    return False


async def read_stream(member: Member, first: asyncio.Event) -> list[str]:
    """Data of all events; `first` is set with the first one."""
    url = f"http://127.0.0.1:{member.server.http_port}/v1/completions"
    events = []
    async with (
        httpx.AsyncClient(timeout=DEADLINE_S) as client,
        client.stream("POST", url, json=BODY) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                first.set()
    return events


async def whole_group(members: Members, **settings: Any) -> tuple[Member, Member, Member]:
    leader, first, second = (
        members.leader(**settings),
        members.worker(1, **settings),
        members.worker(2, **settings),
    )
    await until(lambda: is_answered(leader, "/ready", 200))
    return leader, first, second


async def test_a_group_serves_once_all_have_joined_in_whatever_order(members: Members) -> None:
    second = members.worker(2)
    await until(lambda: is_answered(second, "/health", 200))
    assert await second.status_of("/started") == 503
    leader = members.leader()
    await until(lambda: is_answered(second, "/started", 200))
    waiting = [await leader.status_of(path) for path in ("/health", "/started", "/ready")]

    first = members.worker(1)

    await until(lambda: is_answered(leader, "/ready", 200))
    assert waiting == [200, 503, 503]
    assert await leader.status_of("/started") == 200
    assert await first.status_of("/ready") == 200
    async with grpc.aio.insecure_channel(f"127.0.0.1:{_grpc_port(leader)}") as channel:
        stub = rpc.TelemetryStub(channel)  # type: ignore[no-untyped-call]
        description = await stub.Describe(pb.DescribeRequest(), metadata=[("x-kvoy-secret", "s")])
    assert description.parallel.tensor == 3


def _grpc_port(member: Member) -> int:
    assert isinstance(member.server, EngineServer)
    return member.server.grpc_port


async def test_a_worker_serves_nothing_and_says_who_does(members: Members) -> None:
    worker = members.worker(1)
    await until(lambda: is_answered(worker, "/health", 200))

    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        url = f"http://127.0.0.1:{worker.server.http_port}"
        answer = await client.post(f"{url}/v1/completions", json=BODY)
        metrics = await client.get(f"{url}/metrics")

    assert answer.status_code == 503
    assert "rank 1 of a group" in answer.json()["error"]["message"]
    assert 'rank="1"' in metrics.text


async def test_a_lost_worker_ends_the_group_and_its_streams_with_an_error(
    members: Members,
) -> None:
    leader, first, second = await whole_group(members, sim_base_s=0.02)
    streaming = asyncio.Event()
    stream = asyncio.ensure_future(read_stream(leader, streaming))
    await streaming.wait()

    first.running.cancel()

    events = await stream
    assert "rank 1 of the group is lost" in json.loads(events[-1])["error"]["message"]
    assert await leader.running == 1
    assert await second.running == 1


async def test_health_and_readiness_of_a_broken_group_are_red(members: Members) -> None:
    leader, first, _ = await whole_group(members)

    first.running.cancel()

    await until(lambda: is_answered(leader, "/health", 503))
    assert await leader.status_of("/ready") == 503
    assert await leader.status_of("/started") == 200


async def test_a_worker_that_ends_while_its_group_drains_ends_the_streams_with_an_error(
    members: Members,
) -> None:
    leader, first, second = await whole_group(members, sim_base_s=0.02)
    streaming = asyncio.Event()
    stream = asyncio.ensure_future(read_stream(leader, streaming))
    await streaming.wait()

    first.server.request_drain()
    first.server.request_drain()

    assert "rank 1 of the group is lost" in json.loads((await stream)[-1])["error"]["message"]
    assert [await member.running for member in (leader, first, second)] == [1, 0, 1]


async def test_a_lost_leader_ends_its_workers_with_an_error(members: Members) -> None:
    settings = {"nnodes": 2, "tensor_parallel_size": 2}
    secret, config = "s", members.settings(0, **settings)
    hung_up = asyncio.Event()

    async def dying_leader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        group_wire.write(writer, group_wire.Challenge("c"))
        join = await group_wire.read(reader)
        assert isinstance(join, group_wire.Join)
        assert join.settings == group_wire.shared_settings(config)
        proof = group_wire.proof(secret, "leader", "c", join.nonce, join.settings)
        group_wire.write(writer, group_wire.Joined(proof))
        await hung_up.wait()
        writer.close()

    server = await asyncio.start_server(dying_leader, "127.0.0.1", members.port)
    worker = members.worker(1, **settings)
    await until(lambda: is_answered(worker, "/ready", 200))

    hung_up.set()

    assert await worker.running == 1
    server.close()


async def test_a_leader_that_drains_lets_its_streams_finish_and_its_workers_go(
    members: Members,
) -> None:
    leader, first, second = await whole_group(members, sim_base_s=0.002)
    streaming = asyncio.Event()
    stream = asyncio.ensure_future(read_stream(leader, streaming))
    await streaming.wait()

    leader.server.request_drain()

    assert (await stream)[-1] == "[DONE]"
    assert [await member.running for member in (leader, first, second)] == [0, 0, 0]


async def test_when_all_are_told_to_end_at_once_running_streams_still_finish(
    members: Members,
) -> None:
    group = await whole_group(members, sim_base_s=0.002)
    streaming = asyncio.Event()
    stream = asyncio.ensure_future(read_stream(group[0], streaming))
    await streaming.wait()

    for member in reversed(group):
        member.server.request_drain()

    assert (await stream)[-1] == "[DONE]"
    assert [await member.running for member in group] == [0, 0, 0]


async def test_a_worker_that_is_told_to_end_drains_the_whole_group(members: Members) -> None:
    leader, first, second = await whole_group(members, sim_base_s=0.002)
    streaming = asyncio.Event()
    stream = asyncio.ensure_future(read_stream(leader, streaming))
    await streaming.wait()

    first.server.request_drain()

    assert (await stream)[-1] == "[DONE]"
    assert [await member.running for member in (leader, first, second)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 77}, "--max-model-len is None at rank 0 and 77"),
        ({"secret": "other"}, "secret"),
        ({"secret": None}, "secret"),
        ({"nnodes": 9, "tensor_parallel_size": 9}, "--nnodes is 3 at rank 0 and 9"),
    ],
)
async def test_a_process_with_other_settings_or_secret_is_refused_and_ends(
    members: Members, settings: dict[str, Any], words: str
) -> None:
    leader = members.leader()
    worker = members.worker(1, **settings)

    with pytest.raises(StartFailed, match=words):
        await worker.running
    assert await leader.status_of("/started") == 503


async def test_a_leader_without_the_secret_is_not_followed(members: Members) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        group_wire.write(writer, group_wire.Challenge("00"))
        await group_wire.read(reader)
        group_wire.write(writer, group_wire.Joined("00" * 32))
        with contextlib.suppress(group_wire.Unreadable):
            await group_wire.read(reader)
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", members.port)
    worker = members.worker(1, group_timeout_s=0.5)

    with pytest.raises(StartFailed, match="does not know the group's secret"):
        await worker.running
    server.close()


async def test_a_worker_waits_for_a_name_that_nobody_knows_yet_and_then_says_so(
    members: Members,
) -> None:
    patient = members.worker(1, master_addr="leader.invalid")
    await until(lambda: is_answered(patient, "/health", 200))
    hasty = members.worker(2, master_addr="leader.invalid", group_timeout_s=0.5)

    with pytest.raises(StartFailed, match=r"leader\.invalid:\d+ within 0\.5 s"):
        await hasty.running
    assert not patient.running.done()


async def test_a_leader_whose_group_stays_incomplete_names_the_missing(members: Members) -> None:
    members.worker(2)
    leader = members.leader(group_timeout_s=0.5)

    with pytest.raises(StartFailed, match=r"rank 1(, 2)? of the group did not join"):
        await leader.running


async def test_what_is_told_to_end_before_the_group_is_whole_ends_at_once(
    members: Members,
) -> None:
    leader, worker, lonely = members.leader(), members.worker(1), members.worker(2, master_port=1)
    await until(lambda: is_answered(worker, "/ready", 200))

    leader.server.request_drain()
    lonely.server.request_drain()

    assert [await member.running for member in (leader, worker, lonely)] == [0, 0, 0]


async def test_a_taken_group_port_is_one_clear_line(members: Members) -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", members.port)

    with pytest.raises(StartFailed, match=rf"127\.0\.0\.1:{members.port} \(group\)"):
        await members.leader().running
    taken.close()


async def test_a_silent_worker_is_a_lost_one(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_wire, "SILENCE_S", 0.5)
    leader = members.leader(nnodes=2, tensor_parallel_size=2)
    config = members.settings(1, nnodes=2, tensor_parallel_size=2)
    await until(lambda: is_answered(leader, "/health", 200))
    reader, writer = await asyncio.open_connection("127.0.0.1", members.port)
    challenge = await group_wire.read(reader)
    assert isinstance(challenge, group_wire.Challenge)
    settings = group_wire.shared_settings(config)
    proof = group_wire.proof("s", "rank 1", challenge.nonce, "n", settings)
    group_wire.write(writer, group_wire.Join(1, "n", settings, proof))

    assert await leader.running == 1
    writer.close()
