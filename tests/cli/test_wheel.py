"""Kvoy installed from its wheel, away from the checkout, with the extras that a laptop needs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvoy_contract.testing_ports import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 300.0


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    unwanted = ("KVOY_", "PYTHON", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}


@pytest.fixture(scope="module")
def uv() -> str:
    return run(ROOT / "tools" / "find-uv.sh", cwd=ROOT).strip()


@pytest.fixture(scope="module")
def wheel(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(uv, "build", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def install(uv: str, wheel: Path, extras: str, folder: Path) -> Path:
    """A new environment; the path of its `bin`."""
    run(uv, "venv", "--quiet", "--python", ">=3.11", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    run(uv, "pip", "install", "--quiet", "--python", python, f"{wheel}[{extras}]", cwd=folder)
    return folder / "bin"


def test_the_router_s_extra_brings_no_torch(uv: str, wheel: Path, tmp_path: Path) -> None:
    bin_folder = install(uv, wheel, "router", tmp_path / "venv")

    helped = run(bin_folder / "kvoy", "router", "--help", cwd=tmp_path)
    code = "import importlib.util as u; print([n for n in ('torch', 'numpy') if u.find_spec(n)])"
    heavy = run(bin_folder / "python", "-c", code, cwd=tmp_path)
    refused = subprocess.run(
        [bin_folder / "kvoy", "up"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )

    assert "--engine" in helped
    assert heavy.strip() == "[]"
    assert refused.returncode == 1
    assert "pip install 'kvoy[" in refused.stderr


def test_the_stack_runs_from_the_wheel(uv: str, wheel: Path, tmp_path: Path) -> None:
    bin_folder = install(uv, wheel, "sim,router,cli", tmp_path / "venv")
    base = free_port((0, 1, 1000))
    output = tmp_path / "output"
    with output.open("wb") as file:
        up = subprocess.Popen(
            [
                *[str(bin_folder / "kvoy"), "up", "--runner", "sim", "--engines", "1"],
                *["--port", str(base + 1), "--engine-port", str(base)],
            ],
            cwd=tmp_path,
            env=clean_environment() | {"KVOY_HOME": str(tmp_path / "home")},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + LIMIT_S
    while "Serving until Ctrl-C" not in output.read_text() and up.poll() is None:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
    up.send_signal(signal.SIGINT)

    assert up.wait(LIMIT_S) == 0, output.read_text()
    assert "first token after" in output.read_text()
    refused = subprocess.run(
        [bin_folder / "kvoy", "up"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert refused.returncode == 1
    assert "torch" in refused.stderr
    assert "pip install 'kvoy[" in refused.stderr
