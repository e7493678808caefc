"""Real engines in the caller's event loop behind connections that break where a test says; for
tests and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import httpx

from kvoy_contract.names import CHAT_COMPLETIONS_PATH, COMPLETIONS_PATH
from kvoy_contract.sse import TOKEN_IDS_COMMENT, SseParser
from kvoy_router.app import Router
from kvoy_router.testing import eventually, in_flight, running_router


class Addressed(Protocol):
    """An engine as far as a router needs it."""

    @property
    def address(self) -> str: ...

    @property
    def telemetry_address(self) -> str: ...


TOLD = re.compile(re.escape(TOKEN_IDS_COMMENT) + rb"[^\n]*\n\n")
"""To break behind the first ids: how many tokens they say, and so how long an answer is in bytes,
depends on how busy the machine is."""
ALL_TOLD = re.compile(re.escape(TOKEN_IDS_COMMENT) + rb"[^\n]*!\n\n")
"""To break behind the last ids of a choice."""


class Cuts:
    """Where answers break: the next ones each after so many bytes of theirs, or behind a match."""

    def __init__(self) -> None:
        self.after: list[int | re.Pattern[bytes]] = []
        self.num_bytes: list[int] = []
        """Of each answer's bytes so far, in the order of their beginnings."""


class BreakingLink:
    """A TCP link to an engine's HTTP port, in the place of an engine in `running_router`."""

    def __init__(self, address: str, telemetry_address: str, cuts: Cuts) -> None:
        self._target = address.rpartition(":")
        self.telemetry_address = telemetry_address
        self._cuts = cuts
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_requests = 0
        self.address = ""

    async def __aenter__(self) -> BreakingLink:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        host, _, port = self._target
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._requests(reader, up_writer))
                    both.create_task(self._answers(up_reader, writer))
            finally:
                up_writer.transport.abort()
        except* (OSError, _Ended):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if data.startswith(b"POST"):
                self.num_requests += 1
            writer.write(data)
        raise _Ended

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cut: int | re.Pattern[bytes] | None = None
        answer = bytearray()
        position = 0
        while data := await reader.read(65536):
            if data.startswith(b"HTTP/1.1 "):
                cut = self._cuts.after.pop(0) if self._cuts.after else None
                answer.clear()
                position = len(self._cuts.num_bytes)
                self._cuts.num_bytes.append(0)
            num_before = len(answer)
            answer += data
            limit = _limit(cut, answer)
            if limit is not None and len(answer) >= limit:
                writer.write(data[: limit - num_before])
                await writer.drain()
                await asyncio.sleep(0.005)  # the bytes before must arrive: a reset overtakes them
                _reset(writer)
                raise _Ended
            self._cuts.num_bytes[position] += len(data)
            writer.write(data)
        raise _Ended


def _limit(cut: int | re.Pattern[bytes] | None, answer: bytearray) -> int | None:
    """After how many bytes an answer breaks, as far as is known by now."""
    if cut is None or isinstance(cut, int):
        return cut
    found = cut.search(answer)
    return None if found is None else found.end()


class _Ended(Exception):
    pass


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Seen:
    """What a client sees of one stream; two runs of one request are equal in all of it."""

    def __init__(self) -> None:
        self.heads: set[tuple[str, int, str]] = set()
        """Distinct (id, created, model) of its chunks."""
        self.roles: dict[int, int] = {}
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.reasons: dict[int, list[str]] = {}
        self.usage: Any = None
        self.error: dict[str, Any] | None = None
        self.is_done = False

    def add(self, data: bytes) -> None:
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.heads.add((chunk["id"], chunk["created"], chunk["model"]))
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            text = choice.get("text") or delta.get("content") or ""
            self.roles[index] = self.roles.get(index, 0) + ("role" in delta)
            self.texts[index] = self.texts.get(index, "") + text
            if scored := choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(_tokens_of(scored))
            if choice["finish_reason"]:
                self.reasons.setdefault(index, []).append(choice["finish_reason"])

    def assert_equals(self, other: Seen) -> None:
        """Up to what belongs to one run: the id and the time."""
        assert self.error is None, self.error
        assert len(self.heads) == len(other.heads) == 1
        for name in ("roles", "texts", "logprobs", "reasons", "usage", "is_done"):
            assert getattr(self, name) == getattr(other, name), name


def _tokens_of(scored: dict[str, Any]) -> list[Any]:
    if "content" in scored:
        return list(scored["content"])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(scored[name] for name in names), strict=True))


@contextlib.asynccontextmanager
async def client_of(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{router.server.port}", timeout=60, limits=limits
    ) as client:
        yield client


async def read_stream(
    client: httpx.AsyncClient, body: dict[str, Any], seen: Seen | None = None
) -> Seen:
    """Ask for a stream and read it to its end, into `seen` where somebody looks at it meanwhile.
    Internal comments must not be in it."""
    path = CHAT_COMPLETIONS_PATH if "messages" in body else COMPLETIONS_PATH
    seen, parser = seen or Seen(), SseParser()
    options = {"include_usage": True} | body.get("stream_options", {})
    body = body | {"stream": True, "stream_options": options}
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for data in response.aiter_raw():
            for event in parser.feed(data):
                assert not any(line.startswith(TOKEN_IDS_COMMENT) for line in event.comments)
                if event.is_done:
                    seen.is_done = True
                elif event.data is not None:
                    seen.add(event.data)
    return seen


class Bench:
    """Engines behind breaking links, a router in front of them, a client of it."""

    def __init__(
        self, cuts: Cuts, links: list[BreakingLink], router: Router, client: httpx.AsyncClient
    ) -> None:
        self.cuts = cuts
        self.links = links
        self.router = router
        self.client = client

    async def ask(self, body: dict[str, Any], *cuts: int | re.Pattern[bytes]) -> Seen:
        """One stream; its engines' answers break where `cuts` say, one after the other."""
        self.cuts.num_bytes.clear()
        self.cuts.after[:] = cuts
        seen = await read_stream(self.client, body)
        await eventually(lambda: sum(in_flight(self.router)) == 0)
        return seen

    def assert_clean(self) -> None:
        assert in_flight(self.router) == [0] * len(self.links)
        self.router.pool.check_integrity()


@contextlib.asynccontextmanager
async def bench(engines: Sequence[Addressed], **settings: Any) -> AsyncIterator[Bench]:
    cuts = Cuts()
    async with contextlib.AsyncExitStack() as stack:
        links = [
            await stack.enter_async_context(
                BreakingLink(engine.address, engine.telemetry_address, cuts)
            )
            for engine in engines
        ]
        # The breaker is no matter here: engines break time and again.
        defaults = {"breaker_failures": 0, "retry_burst": 100_000}
        router = await stack.enter_async_context(
            running_router(links, **defaults | settings)  # type: ignore[arg-type]
        )
        client = await stack.enter_async_context(client_of(router))
        yield Bench(cuts, links, router, client)
