"""`python -m kvoy_engine` as a process: start, imports, memory, signals, exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from kvoy_contract.testing_ports import free_port

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
MAX_SIM_BYTES = 80 * 2**20


@contextmanager
def engine_process(*argv: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A running engine on free ports and its URL, once it is ready."""
    command = [sys.executable, "-m", "kvoy_engine", "--port", "0", "--telemetry-port", "0"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, *argv], stderr=log)
        try:
            yield process, wait_until_ready(process, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """The URL that the engine says it serves at."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        text = os.pread(log.fileno(), 1 << 20, 0).decode()
        assert process.poll() is None, text
        if found := re.search(r"engine serves .*url=(\S+)", text):
            assert httpx.get(f"{found[1]}/ready").status_code == 200
            return found[1]
        time.sleep(0.05)
    raise AssertionError("the engine was not ready in time")


def test_a_simulated_engine_is_small_and_ends_on_sigterm() -> None:
    with engine_process("--runner", "sim", "--sim-base-s", "0.001") as (process, url):
        body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
        answers = [httpx.post(f"{url}/v1/chat/completions", json=body) for _ in range(10)]
        num_bytes = psutil.Process(process.pid).memory_info().rss

        process.send_signal(signal.SIGTERM)
        status = process.wait(DEADLINE_S)

    assert {answer.status_code for answer in answers} == {200}
    assert status == 0
    assert num_bytes <= MAX_SIM_BYTES


@pytest.mark.parametrize("core", ["thread", "process"])
def test_sigterm_lets_a_stream_finish(core: str) -> None:
    argv = ("--runner", "sim", "--sim-base-s", "0.01", "--core", core)
    with engine_process(*argv) as (process, url):
        body = {"model": "sim", "prompt": "x", "max_tokens": 100, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        status = process.wait(DEADLINE_S)

    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert len(rest) == 100
    assert status == 0


def test_the_death_of_the_core_ends_the_engine_with_an_error() -> None:
    with engine_process("--runner", "sim", "--core", "process") as (process, _):
        (core,) = psutil.Process(process.pid).children()
        core.kill()
        status = process.wait(DEADLINE_S)

    assert status == 1


@pytest.mark.parametrize(
    ("module", "argv", "absent"),
    [
        (
            "kvoy_engine.__main__, kvoy_engine.sim_runner, kvoy_engine.core",
            [],
            ["torch", "transformers", "numpy", "tokenizers", "safetensors"],
        ),
        ("kvoy_engine.__main__, kvoy_engine.model_runner", [], ["transformers"]),
    ],
)
def test_a_start_imports_nothing_that_it_does_not_need(
    module: str, argv: list[str], absent: list[str]
) -> None:
    code = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"

    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True
    )

    assert not set(json.loads(done.stdout)) & set(absent)


def run_to_the_end(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvoy_engine", *argv],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])

        http = run_to_the_end("--runner", "sim", "--port", port, "--telemetry-port", "0")
        grpc = run_to_the_end("--runner", "sim", "--port", "0", "--telemetry-port", port)

    for done in (http, grpc):
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert f"127.0.0.1:{port}" in line


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    done = run_to_the_end(str(tmp_path / "nowhere"), "--port", "0")

    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_group_of_processes_serves_and_ends_with_its_leader() -> None:
    group_port = str(free_port())
    argv = [
        *("--runner", "sim", "--nnodes", "2", "--tensor-parallel-size", "2"),
        *("--master-port", group_port, "--secret", "s"),
    ]
    environment = os.environ | {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "127.0.0.1"}
    command = [sys.executable, "-m", "kvoy_engine", "--port", "0", *argv]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
    try:
        with engine_process(*argv) as (leader, url):
            body = {"model": "sim", "prompt": "x", "max_tokens": 3}
            answer = httpx.post(f"{url}/v1/completions", json=body)
            leader.kill()
            _, log = worker.communicate(timeout=DEADLINE_S)
    finally:
        worker.kill()
        worker.wait()

    assert answer.status_code == 200
    assert worker.returncode == 1
    assert "the leader of its group is lost" in log


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("/nowhere/model",), "ModelLoadFailed: no model '/nowhere/model'"),
        (("hf://org/tiny@main",), "ModelLoadFailed: hf://org/tiny@main is not whole"),
        (("--runner", "sim", "--tokenizer", "/nowhere"), "ModelLoadFailed: cannot read the token"),
        (("--runner", "sim", "--host", "256.0.0.1"), "StartFailed: cannot listen on 256.0.0.1"),
        (("--runner", "sim", "--block-size", "0"), "StartFailed: --hash-stride (64) must be"),
    ],
)
def test_a_failed_start_leaves_its_reason_as_the_last_words_of_its_pod(
    tmp_path: Path, argv: tuple[str, ...], expected: str
) -> None:
    words = tmp_path / "termination-log"
    words.touch()
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KVOY_TERMINATION_LOG": str(words)}

    done = run_to_the_end(*argv, "--port", "0", HF_HOME=str(tmp_path), **pod)

    assert done.returncode != 0
    assert words.read_text().startswith(expected)
    assert words.read_text().count("\n") == 1


def test_outside_a_pod_no_last_words_are_written(tmp_path: Path) -> None:
    words = tmp_path / "termination-log"
    words.touch()

    run_to_the_end("/nowhere/model", "--port", "0", KVOY_TERMINATION_LOG=str(words))

    assert words.read_text() == ""
