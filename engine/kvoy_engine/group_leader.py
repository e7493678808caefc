"""Rank 0 of a group: it waits for the others, and its core is whole as long as they are.

`GroupCore` puts the group behind the interface of a core: a lost rank is a failed core, so health
turns red, running requests end with an error, and the process ends. That is all that the server
needs to know of a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable

from kvoy_engine import group_wire as wire
from kvoy_engine.config import EngineConfig
from kvoy_engine.group import Group, Refusal, Verdict
from kvoy_engine.loop import CoreClient, CoreSink
from kvoy_engine.messages import Command, StepOutput

logger = logging.getLogger(__name__)

_NONCE_BYTES = 16
_MAX_STRANGERS = 64
"""Connections at once that have not joined."""


class GroupIncomplete(Exception):
    """The group did not come together; the message is one line for people."""


class GroupLeader:
    """Owns the listening socket and the connections of the other ranks."""

    def __init__(self, config: EngineConfig, on_leaving: Callable[[], None]) -> None:
        """`on_leaving` is called when another rank was told to end."""
        self._config = config
        self._on_leaving = on_leaving
        self._group = Group(config.nnodes, wire.shared_settings(config))
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._complete = asyncio.Event()
        self._on_failed: Callable[[str], None] | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen for the other ranks. Raises GroupIncomplete when the port is taken."""
        host, port = self._config.host, self._config.master_port
        try:
            self._server = await asyncio.start_server(
                self._serve, host, port, limit=wire.MAX_LINE_BYTES
            )
        except OSError as error:
            raise GroupIncomplete(
                f"cannot listen on {host}:{port} (group): {error.strerror}"
            ) from None
        logger.info("group waits port=%d ranks=%s", self.port, self._group.missing)

    async def wait_until_complete(self) -> None:
        """Raises GroupIncomplete with the missing ranks when the time is over."""
        try:
            async with asyncio.timeout(self._config.group_timeout_s):
                await self._complete.wait()
        except TimeoutError:
            missing = ", ".join(map(str, self._group.missing))
            raise GroupIncomplete(
                f"rank {missing} of the group did not join within "
                f"{self._config.group_timeout_s:g} s"
            ) from None

    def watch(self, on_failed: Callable[[str], None]) -> None:
        """`on_failed` hears, at most once, why the group is broken."""
        self._on_failed = on_failed
        self._report_failure()

    async def close(self, *, is_orderly: bool) -> None:
        """Let the others go. Not in order: they see a lost leader."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            if is_orderly:
                wire.write(writer, wire.End())
            writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= self._config.nnodes + _MAX_STRANGERS:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(wire.Unreadable, TimeoutError, asyncio.CancelledError):
                await self._converse(reader, writer)
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of another process, from its challenge to its end."""
        challenge = secrets.token_hex(_NONCE_BYTES)
        wire.write(writer, wire.Challenge(challenge))
        message = await wire.read(reader)
        if not isinstance(message, wire.Join):
            return
        if (verdict := self._judge(message, challenge)) is not None:
            logger.warning("group refuses rank=%d reason=%s", message.rank, verdict.reason)
            is_final = verdict.refusal is Refusal.FOR_GOOD
            wire.write(writer, wire.Refused(verdict.reason, is_final))
            await writer.drain()
            return
        self._group.on_joined(message.rank)
        wire.write(writer, wire.Joined(self._proof("leader", challenge, message)))
        logger.info("group rank joined rank=%d missing=%s", message.rank, self._group.missing)
        if self._group.is_complete:
            self._complete.set()
        await self._hold(message.rank, reader, writer)

    def _judge(self, join: wire.Join, challenge: str) -> Verdict | None:
        """The secret first: whoever has it not learns nothing of the group."""
        if not wire.is_proof(join.proof, self._proof(f"rank {join.rank}", challenge, join)):
            return Verdict(Refusal.FOR_GOOD, "the group's secret differs (--secret, KVOY_SECRET)")
        return self._group.refuse(join.rank, join.settings)

    def _proof(self, who: str, challenge: str, join: wire.Join) -> str:
        return wire.proof(self._config.secret, who, challenge, join.nonce, join.settings)

    async def _hold(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Exchange beats with a joined rank until it is lost."""
        beats = asyncio.ensure_future(send_beats(writer))
        try:
            while True:
                message = await wire.read(reader)
                if isinstance(message, wire.Leaving):
                    logger.info("group rank leaves rank=%d", rank)
                    self._on_leaving()
        except TimeoutError:
            self._lose(rank, f"it was silent for {wire.SILENCE_S:g} s")
        except wire.Unreadable as error:
            self._lose(rank, str(error))
        finally:
            beats.cancel()

    def _lose(self, rank: int, why: str) -> None:
        self._group.on_lost(rank, why)
        logger.warning("group rank lost rank=%d reason=%s", rank, why)
        if not self._group.is_complete:
            self._complete.clear()
        self._report_failure()

    def _report_failure(self) -> None:
        if self._group.failure is not None and self._on_failed is not None:
            on_failed, self._on_failed = self._on_failed, None
            on_failed(self._group.failure)


async def send_beats(writer: asyncio.StreamWriter) -> None:
    """Until cancelled."""
    while True:
        wire.write(writer, wire.Beat())
        await asyncio.sleep(wire.BEAT_S)


class GroupCore:
    """A core that is alive while its process and every rank of its group are; a `CoreClient`."""

    def __init__(self, inner: CoreClient, leader: GroupLeader) -> None:
        self._inner = inner
        self._leader = leader
        self._sink: CoreSink | None = None
        self._has_failed = False

    def start(self, sink: CoreSink) -> None:
        self._sink = sink
        self._inner.start(self)
        self._leader.watch(self.on_core_failed)

    def submit(self, command: Command) -> None:
        self._inner.submit(command)

    async def close(self) -> None:
        await self._leader.close(is_orderly=not self._has_failed)
        await self._inner.close()

    def on_step(self, output: StepOutput) -> None:
        assert self._sink is not None
        if not self._has_failed:
            self._sink.on_step(output)

    def on_core_failed(self, reason: str) -> None:
        """Of the core itself or of the group, whichever comes first."""
        assert self._sink is not None
        if not self._has_failed:
            self._has_failed = True
            self._sink.on_core_failed(reason)
