"""What an engine says of itself over gRPC: its description, and one load report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from kvoy_contract.names import SECRET_METADATA_KEY
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as pb_grpc

_LIMIT_S = 10.0


async def describe(port: int, secret: str | None = None) -> pb.EngineDescription:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(_LIMIT_S):
        stub = pb_grpc.TelemetryStub(channel)  # type: ignore[no-untyped-call]
        description: pb.EngineDescription = await stub.Describe(
            pb.DescribeRequest(), metadata=_metadata(secret)
        )
        return description


async def read_load(port: int, secret: str | None = None) -> pb.LoadReport:
    """The first load report of a new Watch stream."""

    async def hello() -> AsyncIterator[pb.WatchRequest]:
        yield pb.WatchRequest(hello=pb.Hello(router_id="bench", router_version=""))
        await asyncio.sleep(_LIMIT_S)

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(_LIMIT_S):
        stub = pb_grpc.TelemetryStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Watch(hello(), metadata=_metadata(secret))
        async for event in call:
            if event.HasField("load"):
                call.cancel()
                load: pb.LoadReport = event.load
                return load
    raise ConnectionError("the telemetry stream ended without a load report")


def _metadata(secret: str | None) -> tuple[tuple[str, str], ...]:
    return ((SECRET_METADATA_KEY, secret),) if secret else ()
