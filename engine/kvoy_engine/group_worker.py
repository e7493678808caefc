"""A rank other than 0: it finds its leader, joins it, and lives as long as the leader does.

It serves no request: `/health`, `/started`, `/ready` and `/metrics` answer, everything else is a
503 that names the leader. Told to end, it says so to the leader, which finishes the group's
requests first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from kvoy_contract.errors import Unavailable
from kvoy_engine import asgi
from kvoy_engine import group_wire as wire
from kvoy_engine.asgi import Receive, Scope, Send
from kvoy_engine.config import EngineConfig
from kvoy_engine.events import first_done
from kvoy_engine.group_leader import send_beats
from kvoy_engine.http_server import StartFailed, create_http, listen
from kvoy_engine.metrics import CONTENT_TYPE, engine_info, register_info

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
_LOG_EVERY_S = 15.0
_NONCE_BYTES = 16


class NotYet(Exception):
    """The leader cannot be joined now; the message says why."""


class GroupWorker:
    """Owns one worker's HTTP socket and its connection to the leader."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._settings = wire.shared_settings(config)
        self._registry = CollectorRegistry(auto_describe=False)
        register_info(self._registry, engine_info(config))
        self._drain = asyncio.Event()
        self._stop = asyncio.Event()
        self.joined = asyncio.Event()
        self.http_port = 0

    def request_drain(self) -> None:
        """End with the group. A second time: end at once."""
        if self._drain.is_set():
            self._stop.set()
        self._drain.set()

    async def run(self) -> int:
        """Until the leader ends or is lost; the exit status. Raises StartFailed."""
        with listen(self._config.host, self._config.port) as listener:
            self.http_port = listener.getsockname()[1]
            http = create_http(self._app, self._config)
            serving = asyncio.ensure_future(http.serve(sockets=[listener]))
            try:
                return await self._live()
            finally:
                http.should_exit = True
                await serving

    async def _live(self) -> int:
        joining = asyncio.ensure_future(self._join())
        try:
            await first_done(joining, self._drain)
            if not joining.done():
                return 0
            reader, writer = joining.result()
        finally:
            joining.cancel()
        try:
            return await self._follow(reader, writer)
        finally:
            writer.close()

    async def _join(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Try until the time is over: a name that nobody knows yet is no error."""
        config = self._config
        deadline_s = self._clock() + config.group_timeout_s
        delay_s, logged_s = _FIRST_DELAY_S, -_LOG_EVERY_S
        while True:
            try:
                return await self._join_once()
            except NotYet as error:
                where = f"{config.master_addr}:{config.master_port}"
                if self._clock() >= deadline_s:
                    raise StartFailed(
                        f"rank {config.node_rank} could not join its leader {where} within "
                        f"{config.group_timeout_s:g} s: {error}"
                    ) from None
                if self._clock() - logged_s >= _LOG_EVERY_S:
                    logged_s = self._clock()
                    logger.info("worker waits for its leader leader=%s reason=%s", where, error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def _join_once(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises NotYet, or StartFailed when the leader never will have this process."""
        config = self._config
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    config.master_addr.strip(), config.master_port, limit=wire.MAX_LINE_BYTES
                )
        except (OSError, TimeoutError) as error:
            raise NotYet(str(error) or "no answer") from None
        try:
            await self._introduce(reader, writer)
        except (wire.Unreadable, TimeoutError) as error:
            writer.close()
            raise NotYet(str(error) or "no answer") from None
        except BaseException:
            writer.close()
            raise
        self.joined.set()
        logger.info("worker joined rank=%d leader=%s", config.node_rank, config.master_addr)
        return reader, writer

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        config = self._config
        challenge = await wire.read(reader)
        if not isinstance(challenge, wire.Challenge):
            raise wire.Unreadable("the leader does not speak this protocol")
        nonce = secrets.token_hex(_NONCE_BYTES)

        def proof(who: str) -> str:
            return wire.proof(config.secret, who, challenge.nonce, nonce, self._settings)

        rank = config.node_rank
        wire.write(writer, wire.Join(rank, nonce, self._settings, proof(f"rank {rank}")))
        answer = await wire.read(reader)
        if isinstance(answer, wire.Refused):
            if answer.is_final:
                raise StartFailed(f"the group's leader refuses rank {rank}: {answer.reason}")
            raise NotYet(answer.reason)
        if not isinstance(answer, wire.Joined) or not wire.is_proof(answer.proof, proof("leader")):
            raise NotYet("what answers there does not know the group's secret")

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """Beats until the leader ends; the exit status."""
        beats = asyncio.ensure_future(send_beats(writer))
        listening = asyncio.ensure_future(self._until_the_leader_ends(reader))
        try:
            await first_done(listening, self._drain)
            if not listening.done():
                logger.info("worker was told to end and waits for its leader")
                wire.write(writer, wire.Leaving())
                await first_done(listening, self._stop, timeout_s=self._config.drain_timeout_s)
            if not listening.done() or listening.result() or self._drain.is_set():
                logger.info("worker ends rank=%d", self._config.node_rank)
                return 0
            logger.error("worker ends: the leader of its group is lost")
            return 1
        finally:
            self.joined.clear()
            beats.cancel()
            listening.cancel()

    async def _until_the_leader_ends(self, reader: asyncio.StreamReader) -> bool:
        """Whether it ended in order; otherwise it is lost."""
        with contextlib.suppress(wire.Unreadable, TimeoutError):
            while not isinstance(await wire.read(reader), wire.End):
                pass
            return True
        return False

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/health":
            await self._answer(send, 200)
        elif path in ("/started", "/ready"):
            await self._answer(send, 200 if self.joined.is_set() else 503)
        elif path == "/metrics":
            body = generate_latest(self._registry)
            await asgi.send_body(send, 200, body, CONTENT_TYPE.encode())
        else:
            config = self._config
            await asgi.send_error(
                send,
                Unavailable(
                    f"This is rank {config.node_rank} of a group; requests go to rank 0 at "
                    f"{config.master_addr}."
                ),
            )

    async def _answer(self, send: Send, status: int) -> None:
        state = "joined" if self.joined.is_set() else "joining"
        body = msgspec.json.encode({"status": state, "rank": self._config.node_rank})
        await asgi.send_body(send, status, body)
