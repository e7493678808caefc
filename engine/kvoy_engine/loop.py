"""The step loop, and the thread that runs it beside the server.

`run_core` owns an `EngineCore`: it takes commands from an `Inbox`, steps while there is work and
emits one `StepOutput` per step, and after commands that no step answers at once. It is the same
loop in a thread (`ThreadCore`, here) and in a process of its own (`core_process`); only messages
cross.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvoy_engine.messages import Command, StepOutput, TokensOut

logger = logging.getLogger(__name__)

Emit = Callable[[StepOutput], None]


class SteppingCore(Protocol):
    """What the loop needs of `core.EngineCore`."""

    @property
    def has_work(self) -> bool: ...

    def handle(self, command: Command, now_s: float) -> list[TokensOut]: ...

    def step(self, now_s: float) -> StepOutput: ...

    def report(self, now_s: float, tokens: list[TokensOut]) -> StepOutput: ...


class CoreSink(Protocol):
    """Who receives what a core emits, on the server's event loop."""

    def on_step(self, output: StepOutput) -> None: ...

    def on_core_failed(self, reason: str) -> None:
        """The core is gone for good. Called at most once, after the last `on_step`."""
        ...


class CoreClient(Protocol):
    """The server's handle on a core, wherever it runs."""

    def start(self, sink: CoreSink) -> None:
        """Begin to step; the running event loop is where `sink` will be called."""
        ...

    def submit(self, command: Command) -> None:
        """Hand over a command; never blocks, and has no effect once the core is gone."""
        ...

    async def close(self) -> None:
        """End the core; whatever it still computes is dropped."""
        ...


class Inbox:
    """Commands on their way to the core; the only thing that two threads share."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._commands: list[Command] = []
        self._closed = False

    def put(self, command: Command) -> None:
        with self._condition:
            self._commands.append(command)
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()

    def take(self, *, wait: bool) -> list[Command] | None:
        """All commands so far, waiting for the first one if asked to; None once closed."""
        with self._condition:
            while wait and not self._commands and not self._closed:
                self._condition.wait()
            if self._closed:
                return None
            commands, self._commands = self._commands, []
            return commands


def run_core(
    core: SteppingCore, inbox: Inbox, emit: Emit, clock: Callable[[], float] = time.monotonic
) -> None:
    """Serve commands and step until the inbox is closed. Raises what a broken runner raises."""
    while (commands := inbox.take(wait=not core.has_work)) is not None:
        if commands:
            # Before the step, which may be long: routers learn at once what was admitted.
            tokens = [out for command in commands for out in core.handle(command, clock())]
            emit(core.report(clock(), tokens))
        if core.has_work:
            emit(core.step(clock()))


class ThreadCore:
    """Runs a core in a daemon thread of this process; see `CoreClient`."""

    def __init__(self, core: SteppingCore, on_close: Callable[[], None] = lambda: None) -> None:
        """`on_close` runs in the core's thread once the loop has ended, to free the runner."""
        self._core = core
        self._on_close = on_close
        self._inbox = Inbox()
        self._thread: threading.Thread | None = None

    def start(self, sink: CoreSink) -> None:
        event_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._run, args=(event_loop, sink), name="kvoy-core", daemon=True
        )
        self._thread.start()

    def submit(self, command: Command) -> None:
        self._inbox.put(command)

    async def close(self) -> None:
        """Waits a moment for the step in progress; a stuck one does not hold up the exit."""
        self._inbox.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    def _run(self, event_loop: asyncio.AbstractEventLoop, sink: CoreSink) -> None:
        def emit(output: StepOutput) -> None:
            event_loop.call_soon_threadsafe(sink.on_step, output)

        try:
            run_core(self._core, self._inbox, emit)
        except Exception as error:
            if event_loop.is_closed():
                return
            logger.exception("step loop failed")
            event_loop.call_soon_threadsafe(sink.on_core_failed, describe_failure(error))
        finally:
            self._on_close()


CLOSE_TIMEOUT_S = 5.0


def describe_failure(error: BaseException) -> str:
    """One line that is fit for a client: the kind of error and its first line."""
    first_line = str(error).strip().splitlines()[:1]
    return ": ".join([type(error).__name__, *first_line])
