"""FakeEngine: speaks the contract over real sockets, says what its script says, computes nothing.

For tests of everything that talks to engines: HTTP with scripted delays, failures and broken
answers, and gRPC telemetry whose events a test sends one by one. It runs on the caller's event
loop."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import grpc

from kvoy_contract import envelope as envelopes
from kvoy_contract import names
from kvoy_contract.blocks import BlockHash, pack_hashes
from kvoy_contract.prompt import TokenizerFiles, byte_tokenizer_files
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2_grpc as pb_grpc

_MAX_HEAD_BYTES = 1024 * 1024


class Fault(enum.StrEnum):
    """How an answer breaks. `fault_after` counts the pieces that still come."""

    NONE = "none"
    CLOSE_BEFORE_HEAD = "close_before_head"
    RESET_BEFORE_HEAD = "reset_before_head"
    HANG_BEFORE_HEAD = "hang_before_head"
    NOT_HTTP = "not_http"
    RESET_AFTER_HEAD = "reset_after_head"
    EMPTY_BODY = "empty_body"
    CUT = "cut"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Script:
    """One answer."""

    pieces: tuple[str, ...] = ("Hello", " world", "!")
    delay_s: float = 0.0
    """Before the head."""
    gap_s: float = 0.0
    """Before each piece but the first."""
    gate: asyncio.Event | None = None
    """The head waits for it."""
    status: int = 200
    body: bytes | None = None
    """Instead of a completion."""
    headers: tuple[tuple[str, str], ...] = ()
    cached_tokens: int = 0
    fault: Fault = Fault.NONE
    fault_after: int = 1
    keep_alive: bool = True


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    """The client's own body, without the envelope."""
    envelope: envelopes.Envelope | None = None

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True, eq=False)
class _Stream:
    """One router's Watch stream; None in the queue breaks it off."""

    router_id: str
    queue: asyncio.Queue[pb.WatchEvent | None] = field(default_factory=asyncio.Queue)
    seq: int = 0
    num_acks: int = 0


class FakeEngine(pb_grpc.TelemetryServicer):
    """`async with FakeEngine(...) as engine` listens; see the attributes for what can be set and
    read."""

    def __init__(
        self,
        model: str = "m",
        *,
        aliases: tuple[str, ...] = (),
        identity: str | None = None,
        secret: str = "",
        envelope: bool = True,
        engine_kind: str = "kvoy",
        max_num_seqs: int = 64,
        num_blocks: int = 1024,
        max_model_len: int = 8192,
        keep_alive_s: float = 30.0,
        heartbeat_s: float = 0.2,
        tokenizer: TokenizerFiles | None = None,
        port: int = 0,
        telemetry_port: int = 0,
    ) -> None:
        self.tokenizer = tokenizer or byte_tokenizer_files()
        self.secret = secret
        self.keep_alive_s = keep_alive_s
        self.heartbeat_s = heartbeat_s
        self.script = Script()
        """The answer to every request for which `scripts` holds none."""
        self.scripts: deque[Script] = deque()
        self.requests: list[ReceivedRequest] = []
        self.in_flight = 0
        self.num_connections = 0
        """Accepted since the start."""
        self.num_aborted = 0
        """Requests whose client left before the answer was complete."""
        self.num_describes = 0
        self.num_tokenizer_calls = 0
        self.blocks: dict[BlockHash, None] = {}
        self.is_muted = False
        """No load reports, no heartbeat."""
        self.load = pb.LoadReport(
            free_blocks=num_blocks,
            total_blocks=num_blocks,
            prefill_tokens_per_s=1000.0,
            step_time_s=0.01,
            ready=True,
        )
        self.description = pb.EngineDescription(
            epoch=os.urandom(16),
            served_model=model,
            aliases=aliases,
            model_identity=identity or f"identity-of-{model}",
            role=pb.ROLE_BOTH,
            block_size=16,
            hash_stride=64,
            num_blocks=num_blocks,
            block_bytes=4096,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            tokenizer_digest=self.tokenizer.digest,
            engine_kind=engine_kind,
            engine_version="0",
            capabilities=pb.Capabilities(
                envelope=envelope, token_ids=envelope, cache_salt=True, admitted_through=envelope
            ),
        )
        self._port = port
        self._telemetry_port = telemetry_port
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._admitted: dict[str, set[int]] = {}
        self._streams: set[_Stream] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: asyncio.Server | None = None
        self._grpc: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def telemetry_address(self) -> str:
        return f"127.0.0.1:{self._telemetry_port}"

    @property
    def router_ids(self) -> set[str]:
        """Of the routers that watch now."""
        return {stream.router_id for stream in self._streams}

    @property
    def num_acks(self) -> int:
        """Snapshot acknowledgements on the streams that are open now."""
        return sum(stream.num_acks for stream in self._streams)

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
            self._serve, "127.0.0.1", self._port, limit=_MAX_HEAD_BYTES
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
            while await self._serve_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection can carry another."""
        async with asyncio.timeout(self.keep_alive_s):
            head = await reader.readuntil(b"\r\n\r\n")
        request = await self._read_request(head, reader)
        self.requests.append(request)
        script = self.scripts.popleft() if self.scripts else self.script
        self._admit(request)
        self.in_flight += 1
        answer = asyncio.create_task(self._answer_in_turn(request, script, writer))
        gone = asyncio.create_task(_end_of_stream(reader))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result() and script.keep_alive
            self.num_aborted += 1
            return False
        finally:
            self.in_flight -= 1
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
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
        body = json.dumps(self._completion(request, script, fields)).encode()
        if script.fault in (Fault.RESET_AFTER_HEAD, Fault.CUT):
            writer.write(_head(script, [("content-length", str(len(body)))]))
            writer.write(b"" if script.fault is Fault.RESET_AFTER_HEAD else body[: len(body) // 2])
            await writer.drain()
            _reset(writer)
            return False
        await _send(writer, script, body)
        return True

    def _completion(
        self, request: ReceivedRequest, script: Script, fields: dict[str, Any]
    ) -> dict[str, Any]:
        text = "".join(script.pieces)
        is_chat = request.path == names.CHAT_COMPLETIONS_PATH
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return {
            "id": "fake-1",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 1,
            "model": fields.get("model", ""),
            "choices": [choice],
            "usage": self._usage(request, script),
        }

    def _usage(self, request: ReceivedRequest, script: Script) -> dict[str, Any]:
        envelope = request.envelope
        num_prompt_tokens = len(envelope.token_ids) // 4 if envelope else 1
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": len(script.pieces),
            "total_tokens": num_prompt_tokens + len(script.pieces),
            "prompt_tokens_details": {"cached_tokens": script.cached_tokens},
        }

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
        wants_ids = request.envelope is not None and request.envelope.want_token_ids
        for index, piece in enumerate(script.pieces):
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
            event = b": kvoy-ids 0 %d\n" % (index + 1) if wants_ids else b""
            event += b"data: " + json.dumps(self._chunk(is_chat, fields, [choice])).encode()
            writer.write(_chunk(event + b"\n\n"))
            await writer.drain()
        end: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        end["delta" if is_chat else "text"] = {} if is_chat else ""
        tail = [self._chunk(is_chat, fields, [end])]
        if (fields.get("stream_options") or {}).get("include_usage"):
            tail.append(self._chunk(is_chat, fields, []) | {"usage": self._usage(request, script)})
        data = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in tail)
        writer.write(_chunk(data + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        return True

    @staticmethod
    def _chunk(is_chat: bool, fields: dict[str, Any], choices: list[Any]) -> dict[str, Any]:
        return {
            "id": "fake-1",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": 1,
            "model": fields.get("model", ""),
            "choices": choices,
        }

    def _admit(self, request: ReceivedRequest) -> None:
        if request.envelope is not None:
            numbers = self._admitted.setdefault(request.envelope.router_id, set())
            numbers.add(request.envelope.number)
            numbers.update(range(1, request.envelope.settled_through + 1))
        self.report_load()

    # Telemetry.

    async def start_telemetry(self) -> None:
        """Listen; again on the same port after `stop_telemetry`."""
        self._grpc = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_TelemetryServicer_to_server(self, self._grpc)  # type: ignore[no-untyped-call]
        port = self._telemetry_port
        self._telemetry_port = self._grpc.add_insecure_port(f"127.0.0.1:{port}")
        await self._grpc.start()

    async def stop_telemetry(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop(None)
            self._grpc = None

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.EngineDescription:
        await self._check_secret(context)
        self.num_describes += 1
        return self.description

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TokenizerFile]:
        await self._check_secret(context)
        self.num_tokenizer_calls += 1
        if request.digest not in ("", self.tokenizer.digest):
            await context.abort(grpc.StatusCode.NOT_FOUND, "another tokenizer")
        for name, data in self.tokenizer.parts.items():
            # Two parts each, so that readers are seen to join them.
            half = len(data) // 2
            yield pb.TokenizerFile(name=name, data=data[:half])
            yield pb.TokenizerFile(name=name, data=data[half:], last=True)

    async def Watch(
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchEvent]:
        await self._check_secret(context)
        hello = await anext(request_iterator)
        stream = _Stream(hello.hello.router_id)
        self._streams.add(stream)
        helpers = [
            asyncio.create_task(self._count_acks(stream, request_iterator)),
            asyncio.create_task(self._heartbeat(stream)),
        ]
        try:
            self._put_snapshot(stream)
            while (event := await stream.queue.get()) is not None:
                yield event
            await context.abort(grpc.StatusCode.UNAVAILABLE, "dropped")
        finally:
            self._streams.discard(stream)
            for task in helpers:
                task.cancel()

    async def _check_secret(self, context: grpc.aio.ServicerContext) -> None:
        shown = dict(context.invocation_metadata() or ()).get(names.SECRET_METADATA_KEY)
        if self.secret and not envelopes.secret_matches(self.secret, shown):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "wrong secret")

    async def _count_acks(self, stream: _Stream, requests: AsyncIterator[pb.WatchRequest]) -> None:
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError):
            async for message in requests:
                stream.num_acks += message.HasField("snapshot_ack")

    async def _heartbeat(self, stream: _Stream) -> None:
        while True:
            if not self.is_muted:
                self._put_load(stream)
            await asyncio.sleep(self.heartbeat_s)

    def _put(self, stream: _Stream, event: pb.WatchEvent) -> None:
        stream.seq += 1
        event.seq = stream.seq
        stream.queue.put_nowait(event)

    def _put_snapshot(self, stream: _Stream) -> None:
        begin = pb.SnapshotBegin(num_hashes=len(self.blocks))
        self._put(stream, pb.WatchEvent(epoch=self.description.epoch, snapshot_begin=begin))
        if self.blocks:
            chunk = pb.SnapshotChunk(hashes=pack_hashes(self.blocks))
            self._put(stream, pb.WatchEvent(snapshot_chunk=chunk))
        self._put(stream, pb.WatchEvent(snapshot_end=pb.SnapshotEnd()))

    def _put_load(self, stream: _Stream) -> None:
        report = pb.LoadReport()
        report.CopyFrom(self.load)
        running = min(self.in_flight, self.description.max_num_seqs)
        report.running += running
        report.waiting += self.in_flight - running
        through = 0
        numbers = self._admitted.get(stream.router_id, set())
        while through + 1 in numbers:
            through += 1
        report.admitted_through = through
        report.admitted_beyond.extend(sorted(n for n in numbers if n > through))
        self._put(stream, pb.WatchEvent(load=report))

    def report_load(self, **fields: Any) -> None:
        """Change fields of the load report, and send it to every router."""
        for name, value in fields.items():
            setattr(self.load, name, value)
        if not self.is_muted:
            for stream in self._streams:
                self._put_load(stream)

    def change_blocks(
        self,
        stored: Iterable[BlockHash] = (),
        removed: Iterable[BlockHash] = (),
        cleared: bool = False,
    ) -> None:
        """Change what this engine holds, and report it."""
        stored, removed = list(stored), list(removed)
        if cleared:
            self.blocks.clear()
        for block_hash in removed:
            self.blocks.pop(block_hash, None)
        self.blocks.update(dict.fromkeys(stored))
        delta = pb.BlockDelta(
            cleared=cleared, removed=pack_hashes(removed), stored=pack_hashes(stored)
        )
        for stream in self._streams:
            self._put(stream, pb.WatchEvent(blocks=delta))

    def send_snapshot(self) -> None:
        """Begin anew inside every open stream, as an engine does whose reader was too slow."""
        for stream in self._streams:
            self._put_snapshot(stream)

    def skip_seq(self, count: int = 1) -> None:
        """Lose so many events of every stream."""
        for stream in self._streams:
            stream.seq += count

    def drop_streams(self) -> None:
        for stream in self._streams:
            stream.queue.put_nowait(None)

    def restart(self) -> None:
        """Another process on the same address: new epoch, nothing held, streams broken."""
        self.description.epoch = os.urandom(16)
        self.blocks.clear()
        self._admitted.clear()
        self.drop_streams()


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


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as the kernel does for a killed process with unread input."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _end_of_stream(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        await reader.read(1)
