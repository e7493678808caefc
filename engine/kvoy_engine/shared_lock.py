"""One holder at a time of a folder that processes, pods and nodes may share.

A lock is a row of numbered files `NAME.1`, `NAME.2`, ...: whoever creates the next number, which
file systems do for one process alone, holds it until its file says that it was released. A holder
that died is found in two ways. On the same machine the kernel has dropped its flock: at once. On
another one (a network file system may keep flocks to one machine) its file has not changed for a
minute, by the watcher's own clock; a holder that lives changes it every few seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_STATE_BYTES = 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LockLost(Exception):
    """Others took this process for dead and hold the lock; what it did must not count."""


@dataclass(frozen=True, slots=True)
class Timing:
    """In seconds."""

    beat_s: float = 5.0
    stale_s: float = 60.0
    poll_s: float = 0.5


@dataclass(frozen=True, slots=True)
class _State:
    """What a lock's file says."""

    machine: str
    """Of the holder: only there its flock tells whether it lives."""
    has_flock: bool
    owner: str
    beat: int
    is_released: bool

    def encode(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields).encode().ljust(_STATE_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> _State | None:
        """None while the file is being made."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None


class HeldLock:
    """A lock that this process holds, with a thread that keeps saying so."""

    def __init__(self, path: Path, number: int, fd: int, timing: Timing) -> None:
        self._path = path
        self._number = number
        self._fd = fd
        self._timing = timing
        self._has_flock = _flock(fd, fcntl.LOCK_EX)
        self._beat = 0
        self._ends = threading.Event()
        self._write(is_released=False)
        self._thread = threading.Thread(target=self._run, name="kvoy-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises LockLost. To be called before what was done under the lock is shown to others."""
        if _newest(self._path) != self._number:
            raise LockLost(f"another process took over {self._path.name}")

    def release(self) -> None:
        self._ends.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # a full disk: the flock and the silence tell, too
            self._write(is_released=True)
        os.close(self._fd)

    def _run(self) -> None:
        while not self._ends.wait(self._timing.beat_s):
            self._beat += 1
            with contextlib.suppress(OSError):
                self._write(is_released=False)

    def _write(self, *, is_released: bool) -> None:
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        state = _State(_machine(), self._has_flock, owner, self._beat, is_released)
        os.pwrite(self._fd, state.encode(), 0)
        os.fsync(self._fd)


@dataclass(slots=True)
class _Watch:
    """Watches the file of whoever holds the lock."""

    timing: Timing
    clock: Callable[[], float]
    owner: str = "another process"
    _seen: tuple[int, bytes] = (0, b"")
    _since_s: float = field(default=0.0)

    def is_free(self, path: Path, number: int) -> bool:
        """Whether its holder has released it, or is dead."""
        try:
            with _file(path, number).open("rb") as file:
                data = file.read(_STATE_BYTES)
                state = _State.decode(data)
                if state is not None:
                    self.owner = state.owner
                    if state.is_released:
                        return True
                    if state.has_flock and state.machine == _machine():
                        return _flock(file.fileno(), fcntl.LOCK_SH)
        except FileNotFoundError:
            return False  # a newer one has come meanwhile
        if (number, data) != self._seen:
            self._seen, self._since_s = (number, data), self.clock()
        return self.clock() - self._since_s > self.timing.stale_s


@contextlib.contextmanager
def hold(
    path: Path,
    on_wait: Callable[[str], None],
    timing: Timing = Timing(),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[HeldLock]:
    """Wait until nobody else holds the lock at `path`, and hold it.

    `on_wait` hears once, if it has to wait, who the holder is. Raises OSError where the folder
    cannot be written.
    """
    lock = _acquire(path, on_wait, timing, clock)
    try:
        yield lock
    finally:
        lock.release()


def _acquire(
    path: Path, on_wait: Callable[[str], None], timing: Timing, clock: Callable[[], float]
) -> HeldLock:
    watch = _Watch(timing, clock)
    has_told = False
    while True:
        newest = _newest(path)
        if newest == 0 or watch.is_free(path, newest):
            if (lock := _try_create(path, newest + 1, timing)) is not None:
                return lock
            continue
        if not has_told:
            has_told = True
            on_wait(watch.owner)
        time.sleep(timing.poll_s)


def _try_create(path: Path, number: int, timing: Timing) -> HeldLock | None:
    """None when another process was faster."""
    own = _file(path, number)
    try:
        fd = os.open(own, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return None
    # Whoever looked long ago may have made a number that was passed and removed since.
    if _newest(path) != number:
        os.close(fd)
        own.unlink(missing_ok=True)
        return None
    lock = HeldLock(path, number, fd, timing)
    for older in _numbers(path):
        if older < number:
            _file(path, older).unlink(missing_ok=True)
    return lock


def _file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _newest(path: Path) -> int:
    return max(_numbers(path), default=0)


def _numbers(path: Path) -> list[int]:
    prefix = f"{path.name}."
    ends = [
        name.removeprefix(prefix) for name in os.listdir(path.parent) if name.startswith(prefix)
    ]
    return [int(end) for end in ends if end.isdigit()]


def _flock(fd: int, kind: int) -> bool:
    """Whether it was given at once; False also where the file system has no flocks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _machine() -> str:
    """The same in all containers of one running kernel, and nowhere else."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
