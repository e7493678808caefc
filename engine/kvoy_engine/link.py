"""The server's end of the core's boundary: which requests are live, and who waits for their tokens.

Lives on the event loop. It routes step outputs to the requests that they belong to, shows them to
observers (telemetry, metrics), and sees to it that every live request ends: with its last token, or
with an error when the core dies or stops making progress.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvoy_contract.errors import ApiError, EngineFailed, Unavailable
from kvoy_engine.health import CoreWatch
from kvoy_engine.loop import CoreClient
from kvoy_engine.messages import AbortRequest, AddRequest, StepOutput, TokensOut

logger = logging.getLogger(__name__)

SUPERVISION_S = 0.5
RETRY_AFTER_S = 5.0


class StepObserver(Protocol):
    def on_step(self, output: StepOutput) -> None: ...


class OutputStream:
    """The step outputs of one request's sequences, in order.

    What its consumer has not taken yet is at most the request's own token limit, so it needs no
    other bound.
    """

    def __init__(self, link: CoreLink, commands: Sequence[AddRequest]) -> None:
        self._link = link
        self._open = {
            (command.request_id, choice.index) for command in commands for choice in command.choices
        }
        self._pending: list[TokensOut] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come besides what is pending."""
        return not self._open

    async def take(self) -> list[TokensOut]:
        """All outputs since last asked, at least one; empty once everything has finished.

        Raises what `fail` was given: EngineFailed when the core is dead or stuck.
        """
        while self._failure is None and not self._pending and self._open:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        pending, self._pending = self._pending, []
        return pending

    def end_choice(self, request_id: str, choice: int) -> None:
        """Stop one sequence that has said enough; the core forgets it."""
        if (request_id, choice) in self._open:
            self._open.discard((request_id, choice))
            self._link.submit_abort(AbortRequest(request_id, choice))

    def push(self, out: TokensOut) -> None:
        key = (out.request_id, out.choice)
        if key not in self._open:
            return  # its end was decided on this side
        if out.finish_reason is not None:
            self._open.discard(key)
        self._pending.append(out)
        self._notify()

    def fail(self, error: Exception) -> None:
        """Nothing more is given out; the consumer gets `error`."""
        self._failure = error
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class CoreLink:
    """Owns the live requests of one core; see `loop.CoreSink`."""

    def __init__(
        self,
        client: CoreClient,
        watch: CoreWatch,
        observers: Sequence[StepObserver],
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._watch = watch
        self._observers = observers
        self._clock = clock
        self._streams: dict[str, OutputStream] = {}
        self.failed = asyncio.Event()
        """Set once the core is gone for good."""

    def problem(self) -> str | None:
        return self._watch.problem(self._clock())

    def last_step_age_s(self) -> float:
        return self._watch.last_step_age_s(self._clock())

    @contextmanager
    def open(self, commands: Sequence[AddRequest]) -> Iterator[OutputStream]:
        """Submit requests whose outputs come as one stream; whatever is unfinished at exit is
        aborted.

        Raises Unavailable when the core is dead or stuck.
        """
        if (problem := self.problem()) is not None:
            raise Unavailable(problem, retry_after_s=RETRY_AFTER_S)
        stream = OutputStream(self, commands)
        for command in commands:
            self._streams[command.request_id] = stream
            self._watch.on_submit(self._clock())
            self._client.submit(command)
        try:
            yield stream
        finally:
            for command in commands:
                if self._streams.pop(command.request_id, None) and not stream.is_finished:
                    self._client.submit(AbortRequest(command.request_id))

    def submit_abort(self, abort: AbortRequest) -> None:
        self._client.submit(abort)

    def on_step(self, output: StepOutput) -> None:
        streams = self._streams
        for out in output.tokens:
            if (stream := streams.get(out.request_id)) is not None:
                stream.push(out)
        is_outstanding = any(not stream.is_finished for stream in streams.values())
        self._watch.on_output(output.load, self._clock(), is_outstanding=is_outstanding)
        for observer in self._observers:
            observer.on_step(output)

    def on_core_failed(self, reason: str) -> None:
        self._watch.on_failed(reason)
        self._fail_for_problem()
        self.failed.set()

    async def supervise(self) -> None:
        """End the live requests of a core that is stuck; runs until cancelled."""
        while True:
            await asyncio.sleep(SUPERVISION_S)
            if self._streams and self.problem() is not None:
                self._fail_for_problem()

    def fail_all(self, error: ApiError) -> None:
        """End every live request with `error`."""
        for stream in self._streams.values():
            stream.fail(error)

    def _fail_for_problem(self) -> None:
        problem = self.problem()
        assert problem is not None
        if self._streams:
            logger.error("live requests fail count=%d reason=%s", len(self._streams), problem)
        self.fail_all(EngineFailed(problem))
