"""The identity and the folder of one running cluster, and the removal of what dead ones left.

A run is owned by the process that made it: it holds a lock on a file in the run's folder. A folder
whose lock is free belongs to a run that was killed; the next run removes it, with its cgroups.
"""

from __future__ import annotations

import fcntl
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kvoy_cluster import cgroups
from kvoy_cluster.folders import cluster_home
from kvoy_cluster.waiting import wait_for

_GONE_TIMEOUT_S = 20.0


class Run:
    def __init__(self) -> None:
        """Removes what killed runs left, and makes a new folder."""
        root = cluster_home() / "run"
        root.mkdir(exist_ok=True)
        with _exclusive(root):
            for folder in root.iterdir():
                if folder.is_dir():
                    _remove_if_dead(folder)
            self.id = secrets.token_hex(3)
            """Short, as it becomes part of cgroup names and paths."""
            self.folder = root / self.id
            self.folder.mkdir(mode=0o700)
            self._owner = _lock_file(self.folder).open("w")
            fcntl.flock(self._owner, fcntl.LOCK_EX)

    def close(self) -> None:
        """Removes everything. The run's processes must have ended."""
        try:
            _remove(self.folder)
        finally:
            self._owner.close()


def _remove_if_dead(folder: Path) -> None:
    try:
        lock: IO[str] = _lock_file(folder).open("w")
    except FileNotFoundError:
        return  # its owner has removed it just now
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        _remove(folder)


def _remove(folder: Path) -> None:
    # Killed processes take a moment to leave their cgroups and to stop writing.
    wait_for(lambda: cgroups.remove(folder.name), f"empty cgroups of {folder}", _GONE_TIMEOUT_S)

    def is_gone() -> bool:
        # The next run removes what it finds dead: not what is locked, and the lock goes last.
        with suppress(FileNotFoundError):
            for entry in folder.iterdir():
                if entry != _lock_file(folder):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            shutil.rmtree(folder)
        return not folder.exists()

    wait_for(is_gone, f"removal of {folder}", _GONE_TIMEOUT_S)


def _lock_file(folder: Path) -> Path:
    return folder / "owner.lock"


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
