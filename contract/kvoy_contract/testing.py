"""FakeEngine: speaks the contract over real sockets, says what its script says, computes nothing.

For tests of everything that talks to engines: HTTP with scripted delays, failures and broken
answers, and gRPC telemetry whose events a test sends one by one. It runs on the caller's event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

from kvoy_contract import envelope as envelopes
from kvoy_contract import names
from kvoy_contract.sse import ChoiceIds, token_ids_event
from kvoy_contract.testing_script import (
    Fault,
    ReceivedRequest,
    Script,
    chunk,
    completion,
    usage,
)
from kvoy_contract.testing_telemetry import FakeTelemetry

__all__ = ["FakeEngine", "Fault", "ReceivedRequest", "Script"]

_MAX_HEAD_BYTES = 1024 * 1024


class FakeEngine(FakeTelemetry):
    """`async with FakeEngine(...) as engine` listens; see the attributes for what can be set."""

    def __init__(
        self,
        model: str = "m",
        *,
        max_num_seqs: int = 64,
        keep_alive_s: float = 30.0,
        port: int = 0,
        **telemetry: Any,
    ) -> None:
        """`max_num_seqs` requests are answered at once, the others wait; `telemetry` is passed on
        to `FakeTelemetry`."""
        super().__init__(model, max_num_seqs=max_num_seqs, **telemetry)
        self.keep_alive_s = keep_alive_s
        self.script = Script()
        """The answer to every request for which `scripts` holds none."""
        self.scripts: deque[Script] = deque()
        self.requests: list[ReceivedRequest] = []
        self.num_connections = 0
        """Accepted since the start."""
        self.num_aborted = 0
        """Requests whose client left before the answer was complete."""
        self._port = port
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self._port}"

    async def __aenter__(self) -> Self:
        await self.start_http()
        await self.start_telemetry()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop_http()
        await self.stop_telemetry()

    async def start_http(self) -> None:
        """Listen; again on the same port after `stop_http`."""
        self._http = await asyncio.start_server(
            self._serve, self.host, self._port, limit=_MAX_HEAD_BYTES
        )
        self._port = self._http.sockets[0].getsockname()[1]

    async def stop_http(self) -> None:
        """Refuse connections and cut the open ones: what clients of a killed process see."""
        if self._http is None:
            return
        self._http.close()
        self._http = None
        for writer in list(self._writers):
            _reset(writer)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # HTTP.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.num_connections += 1
        try:
            # A new connection's first request is on its way: only a kept one may be idle.
            read_ahead = await self._serve_one(reader, writer, b"", None)
            while read_ahead is not None:
                read_ahead = await self._serve_one(reader, writer, read_ahead, self.keep_alive_s)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _serve_one(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        read_ahead: bytes,
        idle_s: float | None,
    ) -> bytes | None:
        """Answer one request, whose first bytes are `read_ahead` and whose head comes within
        `idle_s`.

        Returns what was read of the next one, or None when the connection cannot carry any.
        """
        async with asyncio.timeout(idle_s):
            head = read_ahead + await reader.readuntil(b"\r\n\r\n")
        request = await self._read_request(head, reader)
        self.requests.append(request)
        script = self.scripts.popleft() if self.scripts else self.script
        self._admit(request)
        self.in_flight += 1
        answer = asyncio.create_task(self._answer_in_turn(request, script, writer))
        ahead = asyncio.create_task(_read_ahead(reader))
        try:
            await asyncio.wait((answer, ahead), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and not ahead.result():
                self.num_aborted += 1
                return None
            can_go_on = await answer and script.keep_alive
            if not can_go_on:
                return None
            return ahead.result() if ahead.done() else b""
        finally:
            self.in_flight -= 1
            for task in (answer, ahead):
                task.cancel()
            await asyncio.gather(answer, ahead, return_exceptions=True)
            self.report_load()

    async def _read_request(self, head: bytes, reader: asyncio.StreamReader) -> ReceivedRequest:
        request_line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, path, _ = request_line.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        envelope = None
        if headers.get("content-type") == names.ENVELOPE_CONTENT_TYPE:
            envelope, body = envelopes.decode(body)
        return ReceivedRequest(method, path, headers, body, envelope)

    async def _answer_in_turn(
        self, request: ReceivedRequest, script: Script, writer: asyncio.StreamWriter
    ) -> bool:
        async with self._slots:
            return await self._answer(request, script, writer)

    async def _answer(
        self, request: ReceivedRequest, script: Script, writer: asyncio.StreamWriter
    ) -> bool:
        await asyncio.sleep(script.delay_s)
        if script.gate is not None:
            await script.gate.wait()
        if request.envelope is not None and not envelopes.secret_matches(
            self.secret, request.headers.get(names.SECRET_HEADER)
        ):
            script = replace(script, status=403, body=b'{"error":{"message":"secret"}}')
        match script.fault:
            case Fault.CLOSE_BEFORE_HEAD:
                return False
            case Fault.RESET_BEFORE_HEAD:
                _reset(writer)
                return False
            case Fault.HANG_BEFORE_HEAD:
                await asyncio.Event().wait()
            case Fault.NOT_HTTP:
                writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
                await writer.drain()
                return False
        if script.body is not None or script.status != 200 or script.fault is Fault.EMPTY_BODY:
            body = b"" if script.fault is Fault.EMPTY_BODY else script.body or b""
            await _send(writer, script, body)
            return True
        fields = request.json() if request.body else {}
        if fields.get("stream"):
            return await self._stream_pieces(request, script, fields, writer)
        await asyncio.sleep(script.gap_s * max(0, len(script.pieces) - 1))
        body = json.dumps(completion(request, script, fields)).encode()
        if script.fault in (Fault.RESET_AFTER_HEAD, Fault.CUT):
            writer.write(_head(script, [("content-length", str(len(body)))]))
            writer.write(b"" if script.fault is Fault.RESET_AFTER_HEAD else body[: len(body) // 2])
            await writer.drain()
            _reset(writer)
            return False
        await _send(writer, script, body)
        return True

    async def _stream_pieces(
        self,
        request: ReceivedRequest,
        script: Script,
        fields: dict[str, Any],
        writer: asyncio.StreamWriter,
    ) -> bool:
        writer.write(
            _head(
                script,
                [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")],
            )
        )
        is_chat = request.path == names.CHAT_COMPLETIONS_PATH
        envelope = request.envelope
        wants_ids = envelope is not None and envelope.want_token_ids
        resume = envelope.resume if envelope is not None else None
        num_told = 0 if resume is None else len(resume.output_ids[0])
        for index, piece in enumerate(script.pieces[num_told:], num_told):
            if index and script.gap_s:
                await asyncio.sleep(script.gap_s)
            if script.fault is Fault.RESET_AFTER_HEAD or (
                script.fault is Fault.CUT and index == script.fault_after
            ):
                await writer.drain()
                # The bytes before must arrive: a reset may overtake what the kernel still holds.
                await asyncio.sleep(0.02)
                _reset(writer)
                return False
            if script.fault is Fault.HANG and index == script.fault_after:
                await asyncio.Event().wait()
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": piece}} if is_chat else {"text": piece}
            event = b"data: %b\n\n" % json.dumps(chunk(is_chat, fields, [choice])).encode()
            ids = _framed(token_ids_event([ChoiceIds(0, [index + 1])])) if wants_ids else b""
            writer.write(_framed(event) + ids)
            await writer.drain()
        end: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        end["delta" if is_chat else "text"] = {} if is_chat else ""
        tail = [chunk(is_chat, fields, [end])]
        if (fields.get("stream_options") or {}).get("include_usage"):
            tail.append(chunk(is_chat, fields, []) | {"usage": usage(request, script)})
        data = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in tail)
        writer.write(_framed(data + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        return True

    def _admit(self, request: ReceivedRequest) -> None:
        envelope = request.envelope
        if envelope is not None:
            self.admit(envelope.router_id, envelope.number, envelope.settled_through)
        self.report_load()


def _head(script: Script, extra: Iterable[tuple[str, str]]) -> bytes:
    headers = dict(script.headers) | dict(extra)
    headers.setdefault("content-type", "application/json")
    headers.setdefault(names.CACHED_TOKENS_HEADER, str(script.cached_tokens))
    if not script.keep_alive:
        headers["connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {script.status} Scripted\r\n{lines}\r\n".encode()


async def _send(writer: asyncio.StreamWriter, script: Script, body: bytes) -> None:
    writer.write(_head(script, [("content-length", str(len(body)))]) + body)
    await writer.drain()


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as the kernel does for a killed process with unread input."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _read_ahead(reader: asyncio.StreamReader) -> bytes:
    """The first byte of a next request; empty when the client has gone."""
    with contextlib.suppress(OSError):
        return await reader.read(1)
    return b""
