"""The child processes of `kvoy up`: started together, watched, and stopped together.

Each child has a session of its own (Ctrl-C reaches us alone), a log file, and the reading end of a
pipe as its standard input (see `child`). Children are ended by their process id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvoy_cli.errors import ChildDied

STOP_GRACE_S = 10.0
LAUNCHER = (sys.executable, "-m", "kvoy_cli.child")
_POLL_S = 0.05
_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    """For people: `engine 8100`."""
    process: subprocess.Popen[bytes]
    log: Path

    def last_lines(self, count: int) -> list[str]:
        """The end of the child's log, without empty lines."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-count:]


class Children:
    """Owns every child; leaving the context stops them all, whatever happened inside."""

    def __init__(self, log_folder: Path, launcher: Sequence[str] = LAUNCHER) -> None:
        self._log_folder = log_folder
        self._launcher = launcher
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start `kvoy COMMAND...` under the name; its output goes to `<name>.log`."""
        log = self._log_folder / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._launcher, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raise ChildDied when a child has ended by itself."""
        for child in self._children:
            status = child.process.poll()
            if status is not None:
                raise ChildDied(_obituary(child, status))

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End every child: SIGTERM, and after the grace period, or a second Ctrl-C, SIGKILL."""
        children, self._children = self._children, []
        with _second_signal_shortens() as is_urged:
            for child in children:
                _signal_child(child, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while any(child.process.poll() is None for child in children):
                if time.monotonic() > deadline or is_urged():
                    break
                time.sleep(_POLL_S)
        for child in children:
            # The group too: a child may have had processes of its own.
            _kill_group(child)
            child.process.wait()
            if child.process.stdin is not None:
                child.process.stdin.close()


def _signal_child(child: Child, number: signal.Signals) -> None:
    if child.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def _kill_group(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)


def _obituary(child: Child, status: int) -> str:
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    lines = "\n".join(f"  | {line}" for line in child.last_lines(12))
    said = f"; its last words:\n{lines}" if lines else " and said nothing"
    return f"{child.name} {how}{said}\n  whole log: {child.log}"


@contextlib.contextmanager
def _second_signal_shortens() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM has come inside this context, where they do nothing else."""
    seen: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, lambda got, _: seen.append(got)) for number in numbers}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
