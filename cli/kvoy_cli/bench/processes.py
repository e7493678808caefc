"""Child processes of a benchmark: started with a log file each, watched, ended by their own pid.

They die with this process (on Linux), so that an interrupted benchmark leaves nothing running.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_STOP_S = 10.0
_POLL_S = 0.05
_LOG_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class BenchError(Exception):
    """A benchmark cannot go on; the message is for people."""


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def failure(self, what: str) -> BenchError:
        state = f"exit status {self.process.returncode}" if self.has_ended else "still running"
        return BenchError(f"{self.name} {what} ({state}); its log ends:\n{self.log_tail()}")


@asynccontextmanager
async def child(
    name: str,
    command: Sequence[str],
    log_folder: Path,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stop_s: float = _STOP_S,
) -> AsyncIterator[Child]:
    """Run `command` while the block runs; SIGTERM at its end, SIGKILL where that has not helped
    within `stop_s`.

    With `stdout=subprocess.PIPE` only errors go to the log.
    """
    log = log_folder / f"{name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(  # noqa: ASYNC220 (starting one takes no time)
            list(command),
            stdin=stdin,
            stdout=sink if stdout is None else stdout,
            stderr=sink,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=_die_with_parent if _libc is not None else None,
        )
    started = Child(name, process, log)
    try:
        yield started
    finally:
        await stop(started, stop_s)


async def stop(started: Child, patience_s: float = _STOP_S) -> None:
    """End one child by its pid; returns when it is gone."""
    process = started.process
    if process.poll() is None:
        process.terminate()
        deadline_s = time.monotonic() + patience_s
        while process.poll() is None and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        if process.poll() is None:
            process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


async def wait_until(
    condition: Callable[[], Awaitable[bool]],
    children: Sequence[Child],
    what: str,
    limit_s: float,
) -> None:
    """Poll until `condition` holds. Raises BenchError when a child ends first or `limit_s`
    passes."""
    deadline_s = time.monotonic() + limit_s
    while not await condition():
        for started in children:
            if started.has_ended:
                raise started.failure(f"ended while waiting for {what}")
        if time.monotonic() > deadline_s:
            raise children[0].failure(f"did not reach {what!r} within {limit_s:.0f} s")
        await asyncio.sleep(_POLL_S)


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its threads so far; on Linux to the nanosecond, else to the
    tick."""
    if _libc is None:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return time.clock_gettime(_cpu_clock_id(pid))


def tree_cpu_seconds(pid: int) -> float:
    """The same for a process together with its living children."""
    family = [pid, *(member.pid for member in psutil.Process(pid).children(recursive=True))]
    return sum(cpu_seconds(member) for member in family)


def resident_bytes(pid: int) -> int:
    """Physical memory of a process and its children, shared pages counted in each."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(int(member.memory_info().rss) for member in family)


def _cpu_clock_id(pid: int) -> int:
    """What `clock_getcpuclockid(3)` returns on Linux: the process' clock, user and system."""
    return (~pid << 3) | 2


def _die_with_parent() -> None:
    assert _libc is not None
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
