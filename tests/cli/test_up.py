"""`kvoy up` as a user runs it: real processes with the timing runner, on loopback."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvoy_contract.testing_ports import free_port

pytestmark = pytest.mark.slow

LIMIT_S = 90.0


def wait_for(condition: Callable[[], object], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


class Up:
    """One `kvoy up --runner sim` and what it printed."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.base = free_port((0, 1, 2, 1000, 1001, 1002))
        self._output = folder / "output"
        ports = ["--port", str(self.base + 2), "--engine-port", str(self.base)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVOY_")}
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvoy_cli", "up", "--runner", "sim", *ports, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment | {"KVOY_HOME": str(folder / "home")},
                start_new_session=True,
            )
        self._pids: list[int] = []

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.base + 2}/v1"

    def wait_until_serving(self) -> None:
        self.wait_for_text("Serving until Ctrl-C")
        self._pids = [child.pid for child in psutil.Process(self.process.pid).children(True)]

    def wait_for_text(self, text: str) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None or text in self.output, self.output
            return text in self.output

        wait_for(is_there, lambda: self.output)

    def child(self, name: str) -> int:
        """Process id of `serve`'s or `router`'s first child."""
        for pid in self._pids:
            if name in psutil.Process(pid).cmdline():
                return pid
        raise AssertionError(f"no child {name}")

    def wait_until_gone(self) -> int:
        status = self.process.wait(LIMIT_S)
        wait_for(lambda: not any(map(is_alive, self._pids)), lambda: f"left: {self._pids}")
        return status


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path)
    yield running
    if running.process.poll() is None:
        running.process.terminate()
        running.process.wait(LIMIT_S)


def test_it_answers_a_question_and_ctrl_c_stops_every_process(up: Up) -> None:
    up.wait_until_serving()
    chat = subprocess.run(
        [sys.executable, "-m", "kvoy_cli", "chat", "--url", up.url, "--max-tokens", "5"],
        input="hello\n",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    os.kill(up.process.pid, signal.SIGINT)
    status = up.wait_until_gone()

    assert status == 0
    assert f"OpenAI endpoint: {up.url}   model: sim" in up.output
    assert f"curl -N {up.url}/chat/completions" in up.output
    assert re.search(r"first token after \d+ ms, .* engine 127\.0\.0\.1:\d+", up.output)
    assert chat.returncode == 0, chat.stderr
    assert "[first token after" in chat.stdout


def test_sigterm_stops_every_process(up: Up) -> None:
    up.wait_until_serving()

    up.process.terminate()

    assert up.wait_until_gone() == 0


@pytest.mark.parametrize("name", ["serve", "router"])
def test_a_killed_child_ends_the_stack_with_a_message(up: Up, name: str) -> None:
    up.wait_until_serving()

    os.kill(up.child(name), signal.SIGKILL)

    assert up.wait_until_gone() == 1
    assert "was killed by signal 9" in up.output
    assert "whole log: " in up.output


def test_no_process_outlives_a_killed_command(up: Up) -> None:
    up.wait_until_serving()

    up.process.kill()

    up.wait_until_gone()


def test_ctrl_c_during_the_start_stops_every_process(tmp_path: Path) -> None:
    # Half of a group, whose other half never comes: the start lasts.
    group = f"--nnodes 2 --tensor-parallel-size 2 --master-port {free_port()}"
    up = Up(tmp_path, "--engines", "1", "--engine-args", group)
    up.wait_for_text("the router is starting")

    os.kill(up.process.pid, signal.SIGINT)

    assert up.process.wait(LIMIT_S) == 128 + signal.SIGINT
    assert "Serving" not in up.output


def test_a_port_in_use_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        up = Up(tmp_path, "--port", str(port))
        status = up.process.wait(LIMIT_S)

    assert status == 1
    assert f"port {port} for the router: in use" in up.output
    assert not (tmp_path / "home").exists()


def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    up = Up(tmp_path, "--engine-args", "--block-size 7")

    status = up.process.wait(LIMIT_S)

    assert status == 1
    assert "--hash-stride" in up.output


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    up = Up(tmp_path, "--runner", "torch", "nonesuch")

    status = up.process.wait(LIMIT_S)

    assert status == 1
    assert "no model 'nonesuch'" in up.output
    assert "smollm2-135m-instruct" in up.output
