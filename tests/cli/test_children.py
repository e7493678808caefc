"""Children are watched, stopped together, and never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvoy_cli.children import Child, Children
from kvoy_cli.errors import ChildDied

PYTHON = (sys.executable, "-u", "-c")
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
PARENT_OF_ONE = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid); " + (
    SLEEPER
)
WATCHED = "from kvoy_cli.child import watch_parent; watch_parent(); " + SLEEPER
SUPERVISOR = """
import sys, time
from pathlib import Path
from kvoy_cli.children import Children
children = Children(Path(sys.argv[1]), (sys.executable, "-u", "-c"))
child = children.start("one", [sys.argv[2]], {"PATH": "/usr/bin:/bin"})
while not child.last_lines(1):
    time.sleep(0.01)
print(child.process.pid, flush=True)
time.sleep(600)
"""


def wait_for(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started(children: Children, code: str) -> Child:
    child = children.start("one", [code], os.environ)
    wait_for(lambda: child.last_lines(1))
    return child


def test_leaving_the_context_stops_every_child(tmp_path: Path) -> None:
    with Children(tmp_path, PYTHON) as children:
        pids = [started(children, SLEEPER).process.pid for _ in range(2)]
        assert all(is_alive(pid) for pid in pids)

    assert not any(is_alive(pid) for pid in pids)


def test_a_child_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with Children(tmp_path, PYTHON) as children:
        child = children.start("engine 8100", ["print('out of cheese'); exit(3)"], os.environ)
        wait_for(lambda: child.process.poll() is not None)

        with pytest.raises(ChildDied) as report:
            children.check()

    assert "engine 8100 ended with status 3" in str(report.value)
    assert "out of cheese" in str(report.value)
    assert str(tmp_path / "engine-8100.log") in str(report.value)


def test_a_killed_child_is_reported_with_the_signal(tmp_path: Path) -> None:
    with Children(tmp_path, PYTHON) as children:
        child = started(children, SLEEPER)
        os.kill(child.process.pid, signal.SIGKILL)
        wait_for(lambda: child.process.poll() is not None)

        with pytest.raises(ChildDied, match="killed by signal 9"):
            children.check()


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    children = Children(tmp_path, PYTHON)
    child = started(children, STUBBORN)

    children.stop(grace_s=0.1)

    assert child.process.returncode == -signal.SIGKILL


def test_processes_of_a_child_are_stopped_with_it(tmp_path: Path) -> None:
    children = Children(tmp_path, PYTHON)
    child = started(children, PARENT_OF_ONE)
    wait_for(lambda: len(child.last_lines(2)) == 2)
    grandchild = int(child.last_lines(2)[0])

    children.stop(grace_s=5.0)

    wait_for(lambda: not is_alive(grandchild))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path), WATCHED],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)

    os.kill(parent.pid, number)
    parent.wait(30)
    parent.stdout.close()

    wait_for(lambda: not is_alive(child))
