"""Child processes that never outlive their owner, with a log file each."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# The kernel kills the child when the thread that started it ends, however that happens.
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")

_LOG_TAIL_BYTES = 3000


@dataclass(frozen=True, slots=True)
class _Command:
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    pass_fds: tuple[int, ...]


class Processes:
    """Named processes of one cluster. Methods may be called from any thread."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._commands: dict[str, _Command] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # Children die with the thread that starts them: this one lives until `close`.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cluster-starter")

    def start(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> int:
        """Starts `argv`; its output goes to the log of that name. Returns its process id."""
        words = tuple(str(word) for word in argv)
        self._commands[name] = _Command(words, environment or {}, tuple(pass_fds))
        return self.restart(name)

    def restart(self, name: str) -> int:
        """Starts again what once ran under `name`, after ending it if it still runs."""
        self.stop(name)
        process = self._starter.submit(self._spawn, name, self._commands[name]).result()
        self._running[name] = process
        return process.pid

    def _spawn(self, name: str, command: _Command) -> subprocess.Popen[bytes]:
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                [*DIE_WITH_PARENT, *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.environment},
                pass_fds=command.pass_fds,
                # Ctrl-C in the terminal is the owner's to handle.
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def is_running(self, name: str) -> bool:
        process = self._running.get(name)
        return process is not None and process.poll() is None

    def join(self, name: str) -> None:
        """Returns when it has ended by itself."""
        process = self._running.pop(name, None)
        if process is not None:
            process.wait()

    def running(self) -> list[str]:
        return [name for name in self._running if self.is_running(name)]

    def ended(self, *names: str) -> str | None:
        """Why waiting for these processes is in vain: one has ended, with the end of its log."""
        for name in names:
            process = self._running.get(name)
            if process is not None and process.poll() is not None:
                tail = self.log(name).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
                return f"{name} ended with {process.returncode}; its log {self.log(name)}:\n{tail}"
        return None

    def stop(self, name: str) -> None:
        """Kills it: nothing here has state worth a goodbye. Nothing happens if it does not run."""
        process = self._running.pop(name, None)
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """Ends all, the last started first."""
        for name in reversed(list(self._running)):
            self.stop(name)
        self._starter.shutdown()
