"""The engine's gRPC telemetry, as a router sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvoy_contract import blocks, envelope
from kvoy_contract.names import ENVELOPE_CONTENT_TYPE, SECRET_HEADER, SECRET_METADATA_KEY
from kvoy_contract.prompt import PromptEncoder, TokenizerFiles, byte_tokenizer_files
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as rpc
from kvoy_engine import watch
from kvoy_engine.testing_server import RunningEngine, running_engine, sim_config

SECRET = "s3cret"
DEADLINE_S = 60.0


class Router:
    """One watch stream: what it has been told, checked for gaps."""

    def __init__(self, stub: Any, router_id: str, metadata: Any = None) -> None:
        self._call = stub.Watch(metadata=metadata)
        self._router_id = router_id
        self.epoch = b""
        self.hashes: set[bytes] = set()
        self.loads: list[pb.LoadReport] = []
        self.num_snapshots = 0
        self._seq = 0

    async def hello(self) -> None:
        await self._call.write(pb.WatchRequest(hello=pb.Hello(router_id=self._router_id)))

    async def acknowledge(self) -> None:
        ack = pb.SnapshotAck(epoch=self.epoch, seq=self._snapshot_seq)
        await self._call.write(pb.WatchRequest(snapshot_ack=ack))

    async def ask_pace(self, min_interval_s: float) -> None:
        await self._call.write(pb.WatchRequest(pace=pb.Pace(min_interval_s=min_interval_s)))

    async def read(self) -> None:
        """Take one event."""
        event = await self._call.read()
        assert event is not grpc.aio.EOF
        assert event.seq == self._seq + 1, "a gap in the stream"
        self._seq = event.seq
        match event.WhichOneof("event"):
            case "snapshot_begin":
                self.epoch, self.hashes = event.epoch, set()
            case "snapshot_chunk":
                self.hashes |= set(blocks.unpack_hashes(event.snapshot_chunk.hashes))
            case "snapshot_end":
                self.num_snapshots += 1
                self._snapshot_seq = event.seq
            case "blocks":
                if event.blocks.cleared:
                    self.hashes.clear()
                self.hashes -= set(blocks.unpack_hashes(event.blocks.removed))
                self.hashes |= set(blocks.unpack_hashes(event.blocks.stored))
            case "load":
                self.loads.append(event.load)

    async def read_until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await self.read()

    def close(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def telemetry(engine: RunningEngine) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(engine.telemetry_address) as channel:
        yield rpc.TelemetryStub(channel)  # type: ignore[no-untyped-call]


@asynccontextmanager
async def router(
    engine: RunningEngine, router_id: str = "r1", secret: str | None = None
) -> AsyncIterator[Router]:
    metadata = ((SECRET_METADATA_KEY, secret),) if secret else None
    async with telemetry(engine) as stub:
        stream = Router(stub, router_id, metadata)
        await stream.hello()
        try:
            yield stream
        finally:
            stream.close()


@pytest.fixture
async def engine() -> AsyncIterator[RunningEngine]:
    async with running_engine(sim_config(secret=SECRET)) as engine:
        yield engine


async def post_envelope(
    engine: RunningEngine, number: int, body: bytes, *, secret: str = SECRET, **fields: Any
) -> httpx.Response:
    data = envelope.encode(envelope.Envelope(router_id="r1", number=number, **fields), body)
    headers = {"content-type": ENVELOPE_CONTENT_TYPE, SECRET_HEADER: secret}
    async with httpx.AsyncClient(base_url=engine.url, timeout=DEADLINE_S) as client:
        return await client.post("/v1/completions", content=data, headers=headers)


BODY = b'{"model":"sim","prompt":"hello","max_tokens":4,"temperature":0}'


async def test_an_engine_describes_itself_and_hands_over_its_tokenizer() -> None:
    async with running_engine(sim_config(num_gpu_blocks_override=100)) as engine:
        async with telemetry(engine) as stub:
            description = await stub.Describe(pb.DescribeRequest())
            parts: dict[str, bytes] = {}
            async for part in stub.GetTokenizer(pb.GetTokenizerRequest()):
                parts[part.name] = parts.get(part.name, b"") + part.data
            with pytest.raises(grpc.aio.AioRpcError) as other:
                async for _ in stub.GetTokenizer(pb.GetTokenizerRequest(digest="other")):
                    pass
        async with httpx.AsyncClient(base_url=engine.url) as client:
            ids = (await client.post("/tokenize", json={"prompt": "héllo"})).json()["tokens"]

    assert len(description.epoch) == 16
    assert description.served_model == "sim"
    assert description.num_blocks == 100
    assert description.block_size == 16
    assert description.hash_stride == 64
    assert description.capabilities.cache_salt
    assert not description.capabilities.envelope, "no secret, no envelope"
    files = TokenizerFiles.from_parts(parts)
    assert files.digest == description.tokenizer_digest == byte_tokenizer_files().digest
    assert PromptEncoder(files).encode_text("héllo") == ids
    assert other.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("role", "told"),
    [("both", pb.ROLE_BOTH), ("prefill", pb.ROLE_PREFILL), ("decode", pb.ROLE_DECODE)],
)
async def test_an_engine_tells_its_role_and_its_parallel_sizes(role: str, told: pb.Role) -> None:
    config = sim_config(role=role, tensor_parallel_size=4, pipeline_parallel_size=2)
    async with running_engine(config) as engine:
        async with telemetry(engine) as stub:
            description = await stub.Describe(pb.DescribeRequest())
        async with httpx.AsyncClient(base_url=engine.url) as client:
            metrics = (await client.get("/metrics")).text

    assert description.role == told
    assert (description.parallel.tensor, description.parallel.pipeline) == (4, 2)
    (line,) = [line for line in metrics.splitlines() if line.startswith("kvoy_engine_info")]
    assert f'role="{role}"' in line
    assert line.endswith(" 1.0")


async def test_a_router_knows_exactly_the_blocks_that_an_engine_holds(
    engine: RunningEngine,
) -> None:
    ids = [32 + i % 90 for i in range(300)]
    seed = blocks.seed_hash("sim:sim")
    hashes = blocks.stride_hashes(blocks.block_hashes(seed, ids, 16), 16, 64)
    async with router(engine, secret=SECRET) as early:
        await early.read_until(lambda: early.num_snapshots)
        before = set(early.hashes)
        async with httpx.AsyncClient(base_url=engine.url) as client:
            await client.post(
                "/v1/completions", json={"model": "sim", "prompt": ids, "max_tokens": 1}
            )

        await early.read_until(lambda: len(early.hashes) >= len(hashes))
        async with router(engine, "r2", secret=SECRET) as late:
            await late.read_until(lambda: late.num_snapshots)

    assert before == set()
    assert early.hashes == late.hashes == set(hashes)
    assert early.epoch == late.epoch
    assert len(hashes) == 4


@pytest.mark.slow
async def test_every_stream_has_a_heartbeat(engine: RunningEngine) -> None:
    async with router(engine, secret=SECRET) as stream:
        await stream.read_until(lambda: stream.num_snapshots)
        await stream.acknowledge()
        await stream.read_until(lambda: len(stream.loads) >= 4)

    last = stream.loads[-1]
    assert last.ready
    assert not last.draining
    assert last.total_blocks == last.free_blocks > 0
    assert last.uptime_s > 0


async def test_a_router_that_asks_for_fewer_reports_gets_fewer(engine: RunningEngine) -> None:
    async with router(engine, secret=SECRET) as often, router(engine, "r2", SECRET) as seldom:
        await seldom.ask_pace(1.0)
        await often.read_until(lambda: often.loads)
        async with httpx.AsyncClient(base_url=engine.url, timeout=DEADLINE_S) as client:
            body = {"model": "sim", "prompt": "hello", "max_tokens": 400, "ignore_eos": True}
            answer = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await often.read_until(lambda: often.loads[-1].generated_tokens >= 400)
            await answer
        await seldom.read_until(lambda: seldom.loads and seldom.loads[-1].generated_tokens >= 400)

    assert 2 * len(seldom.loads) < len(often.loads)


async def test_load_reports_settle_every_number_whatever_became_of_the_request(
    engine: RunningEngine,
) -> None:
    async with router(engine, secret=SECRET) as stream:
        await stream.read_until(lambda: stream.loads)
        answered = await post_envelope(engine, 1, BODY)
        refused = await post_envelope(engine, 2, b'{"model":"nope","prompt":"x"}')
        skipped = await post_envelope(engine, 5, BODY)
        await stream.read_until(lambda: 5 in stream.loads[-1].admitted_beyond)
        gap = stream.loads[-1].admitted_through
        last = await post_envelope(engine, 6, BODY, settled_through=4)
        await stream.read_until(lambda: stream.loads[-1].admitted_through == 6)

    statuses = [answer.status_code for answer in (answered, refused, skipped, last)]
    assert statuses == [200, 404, 200, 200]
    assert gap == 2
    assert list(stream.loads[-1].admitted_beyond) == []


async def test_an_overflowing_stream_starts_anew_with_a_snapshot(
    engine: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_PENDING_HASHES", 2)
    async with router(engine, secret=SECRET) as stream:
        await stream.read_until(lambda: stream.num_snapshots)
        async with httpx.AsyncClient(base_url=engine.url) as client:
            body = {"model": "sim", "prompt": "long " * 200, "max_tokens": 1}
            await client.post("/v1/completions", json=body)

        await stream.read_until(lambda: len(stream.hashes) == 1000 // 64)

    assert stream.num_snapshots >= 2


@pytest.mark.parametrize("secret", [None, "wrong"])
async def test_telemetry_needs_the_secret(engine: RunningEngine, secret: str | None) -> None:
    metadata = ((SECRET_METADATA_KEY, secret),) if secret else None
    async with telemetry(engine) as stub:
        for call in (
            stub.Describe(pb.DescribeRequest(), metadata=metadata),
            stub.GetTokenizer(pb.GetTokenizerRequest(), metadata=metadata).read(),
            stub.Watch(metadata=metadata).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("secret", ["wrong", ""])
async def test_an_envelope_needs_the_secret(engine: RunningEngine, secret: str) -> None:
    answer = await post_envelope(engine, 1, BODY, secret=secret)

    assert answer.status_code == 403


async def test_an_engine_without_a_secret_takes_no_envelope() -> None:
    async with running_engine() as engine:
        answer = await post_envelope(engine, 1, BODY)

    assert answer.status_code == 403


async def test_token_ids_of_the_router_are_used_only_with_the_same_tokenizer(
    engine: RunningEngine,
) -> None:
    packed = blocks.pack_tokens([65] * 50)
    own = byte_tokenizer_files().digest

    trusted = await post_envelope(engine, 1, BODY, token_ids=packed, tokenizer_digest=own)
    foreign = await post_envelope(engine, 2, BODY, token_ids=packed, tokenizer_digest="other")

    assert trusted.json()["usage"]["prompt_tokens"] == 50
    assert foreign.json()["usage"]["prompt_tokens"] == len("hello")


async def test_an_engine_is_not_ready_before_its_router_knows_it() -> None:
    config = sim_config(expect_router=True)
    async with (
        running_engine(config) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
        grpc.aio.insecure_channel(engine.telemetry_address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        alone = (await client.get("/ready")).status_code
        async with router(engine) as stream:
            await stream.read_until(lambda: stream.num_snapshots and stream.loads)
            told = (await client.get("/ready")).status_code
            unready = await health.Check(health_pb2.HealthCheckRequest())
            await stream.acknowledge()
            await stream.read_until(lambda: stream.loads[-1].ready)
            known = (await client.get("/ready")).status_code
        lost = (await client.get("/ready")).status_code
        ready = await health.Check(health_pb2.HealthCheckRequest())

    assert [alone, told, known, lost] == [503, 503, 200, 200]
    assert unready.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert ready.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_draining_engine_says_so(engine: RunningEngine) -> None:
    async with router(engine, secret=SECRET) as stream:
        await stream.read_until(lambda: stream.loads)
        body = b'{"model":"sim","prompt":"x","max_tokens":200,"ignore_eos":true}'
        running = asyncio.create_task(post_envelope(engine, 1, body))
        await stream.read_until(lambda: stream.loads[-1].running)

        engine.server.request_drain()
        await stream.read_until(lambda: stream.loads[-1].draining)
        answer = await running

    assert not stream.loads[-1].ready
    assert answer.status_code == 200


async def test_a_first_message_that_is_no_hello_is_refused(engine: RunningEngine) -> None:
    async with telemetry(engine) as stub:
        call = stub.Watch(metadata=((SECRET_METADATA_KEY, SECRET),))
        await call.write(pb.WatchRequest(snapshot_ack=pb.SnapshotAck()))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()

    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_id", "is_taken"),
    [("req-1.abc", True), ("x" * 137, True), ("a\r\nb: c", False), ("é", False), ("", False)],
)
async def test_a_routers_request_id_is_used_where_a_header_can_hold_it(
    engine: RunningEngine, request_id: str, is_taken: bool
) -> None:
    answer = await post_envelope(engine, 1, BODY, request_id=request_id)

    assert answer.status_code == 200
    assert (answer.headers["x-request-id"] == request_id) == is_taken


async def test_token_ids_that_are_cut_short_are_a_bad_request(engine: RunningEngine) -> None:
    digest = byte_tokenizer_files().digest

    answer = await post_envelope(engine, 1, BODY, token_ids=b"abc", tokenizer_digest=digest)

    assert answer.status_code == 400
