"""A proxy between an operator and its API server that fails as networks, servers and load do.

Ends TLS with a certificate of the cluster's own authority and speaks to the server as the
operator's user. Runs in a thread with a loop of its own; faults are chosen call by call, and
watches can be frozen, delayed and cut.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from lightkube.config import client_adapter

from kvoy_cluster.pki import ClusterKeys
from kvoy_faults.faults import Call, Cut, Delay, Fault, Refuse
from kvoy_operator.api import load_kubeconfig

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 30.0
_MAX_BODY_BYTES = 64 << 20
_HOP_BY_HOP = frozenset({"connection", "host", "keep-alive", "transfer-encoding", "content-length"})
_REASONS = {409: "Conflict", 429: "TooManyRequests", 503: "ServiceUnavailable", 504: "Timeout"}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Of a watch: when it may be passed on, by the loop's clock."""

    due_s: float
    data: bytes


class FaultProxy:
    """Serves from its making until `close`. Its switches may be turned from any thread."""

    def __init__(self, keys: ClusterKeys, user: str, kubeconfig: Path) -> None:
        """`kubeconfig` is the one that `user` reaches the server itself by."""
        self.decide: Callable[[Call], Fault | None] = lambda call: None
        """Asked of each call but watches, in the proxy's thread."""
        self.is_down = False
        """Connections are cut as soon as somebody asks something."""
        self.are_watches_frozen = False
        self.watch_delay_s = 0.0
        """Events are that old when they arrive."""
        self.calls: list[Call] = []
        self._writes = 0
        self._watches: set[asyncio.Transport] = set()
        self._keys, self._user = keys, user
        self._upstream = load_kubeconfig(str(kubeconfig))
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fault proxy")
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S):
            raise TimeoutError("the proxy did not start")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def cut_watches(self) -> None:
        """Reset the connections of the watches that are open now."""
        self._loop.call_soon_threadsafe(self._abort_watches)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        assert self._upstream.user is not None  # `load_kubeconfig` refuses others
        tls = client_adapter.verify_cluster(
            self._upstream.cluster, self._upstream.user, self._upstream.abs_file
        )
        connector = aiohttp.TCPConnector(limit=0, ssl=tls)
        async with aiohttp.ClientSession(
            connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        ) as self._session:
            app = web.Application(client_max_size=_MAX_BODY_BYTES)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, _HOST, 0, ssl_context=self._server_tls())
            await site.start()
            port = runner.addresses[0][1]
            self.kubeconfig = self._keys.write_kubeconfig(
                f"{self._user}-by-proxy", self._user, server=f"https://{_HOST}:{port}"
            )
            """What the operator is given."""
            self._started.set()
            await self._stop.wait()
            self._abort_watches()
            await runner.cleanup()

    def _server_tls(self) -> ssl.SSLContext:
        stem = f"proxy-of-{self._user}"
        folder = self._keys.write_server(f"{stem}/tls", [_HOST])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        return context

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.is_down:
            return _abort(request)
        if "watch" in request.query:
            return await self._watch(request)
        call = self._call(request)
        fault = self.decide(call)
        if isinstance(fault, Delay):
            await asyncio.sleep(fault.seconds)
        if isinstance(fault, Refuse):
            return _refusal(fault)
        if isinstance(fault, Cut) and not fault.is_applied:
            fault.then()
            return _abort(request)
        answer = await self._forward(request)
        if isinstance(fault, Cut) or self.is_down:
            if isinstance(fault, Cut):
                fault.then()
            return _abort(request)
        return answer

    def _call(self, request: web.Request) -> Call:
        is_write = request.method != "GET" and "dryRun" not in request.query
        is_lease = "/leases" in request.path
        self._writes += is_write and not is_lease
        call = Call(request.method, request.path, is_write, is_lease, self._writes)
        self.calls.append(call)
        return call

    async def _forward(self, request: web.Request) -> web.Response:
        async with self._session.request(
            request.method,
            f"{self._upstream.cluster.server}{request.raw_path}",
            data=await request.read() or None,
            # Else a call without a body gets the type of one.
            skip_auto_headers=("Content-Type",),
            headers=_passed_on(request.headers),
        ) as answer:
            body, headers = await answer.read(), _passed_on(answer.headers)
            return web.Response(status=answer.status, body=body, headers=headers)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if transport is None:  # gone already
            return web.Response()
        self._watches.add(transport)
        try:
            async with self._session.get(
                f"{self._upstream.cluster.server}{request.raw_path}",
                headers=_passed_on(request.headers),
            ) as answer:
                passed = web.StreamResponse(
                    status=answer.status, headers=_passed_on(answer.headers)
                )
                await passed.prepare(request)
                await self._pass_on(answer, passed)
                return passed
        except (aiohttp.ClientError, ConnectionError):
            return _abort(request)
        finally:
            self._watches.discard(transport)

    async def _pass_on(self, answer: aiohttp.ClientResponse, passed: web.StreamResponse) -> None:
        """As old as `watch_delay_s` says, and only while watches are not frozen."""
        pieces: asyncio.Queue[_Piece | None] = asyncio.Queue()

        async def read() -> None:
            async for data in answer.content.iter_any():
                pieces.put_nowait(_Piece(self._loop.time() + self.watch_delay_s, data))
            pieces.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (piece := await pieces.get()) is not None:
                await self._until_due(piece)
                await passed.write(piece.data)
            await reading
        finally:
            reading.cancel()

    async def _until_due(self, piece: _Piece) -> None:
        # Switches are turned from other threads and wake nobody.
        while self.are_watches_frozen or self._loop.time() < piece.due_s:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def _abort_watches(self) -> None:
        for transport in self._watches:
            transport.abort()


def _abort(request: web.Request) -> web.Response:
    """Without an answer. What is returned is for aiohttp, and goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _refusal(fault: Refuse) -> web.Response:
    """In the API server's own form; a 429 comes as text, as its flow control sends it."""
    headers: dict[str, str] = {}
    if fault.retry_after_s is not None:
        headers["Retry-After"] = str(fault.retry_after_s)
    if fault.status == 429:
        return web.Response(
            status=429, text="Too many requests, please try again later.\n", headers=headers
        )
    status: dict[str, Any] = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": fault.status,
        "reason": _REASONS.get(fault.status, "InternalError"),
        "message": f"refused by a test: {fault.status}",
    }
    return web.Response(
        status=fault.status,
        text=json.dumps(status),
        headers=headers,
        content_type="application/json",
    )


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}
