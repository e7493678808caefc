"""`kvoy model fetch`: a hub's model in a folder, once, whatever happens; the hub is a stand-in."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoy_engine.hub_testing import Repository, StandInHub

pytestmark = pytest.mark.slow

MEGABYTE = 1 << 20
WEIGHTS = "model.safetensors"
DEADLINE_S = 120.0


@pytest.fixture
def repository() -> Repository:
    return Repository(
        {
            "config.json": b"{}",
            "tokenizer.json": b'{"version": "1.0"}',
            WEIGHTS: bytes(24 * MEGABYTE),
            "README.md": b"hello",
        }
    )


@pytest.fixture
def hub(repository: Repository) -> Iterator[StandInHub]:
    with StandInHub({"org/tiny": repository}) as running:
        yield running


class Machine:
    """Runs the command with caches of its own, as one line of a Job would."""

    def __init__(self, folder: Path, url: str) -> None:
        self.target = folder / "models" / "tiny"
        own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        own |= {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        self._environment = own | {"KVOY_HOME": str(folder / "kvoy")}

    def start(self, *argv: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvoy_cli", "model", "fetch", *argv]
        return subprocess.Popen(
            [*command, "--to", str(self.target)],
            env=self._environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *argv: str, **environment: str) -> tuple[int, str, str]:
        """(exit status, standard output, standard error)."""
        process = self.start(*argv, **environment)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err


@pytest.fixture
def machine(tmp_path: Path, hub: StandInHub) -> Machine:
    return Machine(tmp_path, hub.url)


def wait_for_download(target: Path) -> None:
    """Until a download for the folder has everything but the weights, and some of these."""
    partial = target.with_name(f".{target.name}.partial")
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        # What is whole is renamed between two looks.
        with contextlib.suppress(FileNotFoundError):
            sizes = [path.stat().st_size for path in partial.rglob("*.incomplete")]
            if (partial / "tokenizer.json").exists() and max(sizes, default=0) >= MEGABYTE:
                return
        time.sleep(0.02)
    raise AssertionError(f"nothing came to {partial}")


def test_the_folder_is_whole_and_a_second_time_nobody_is_asked(
    machine: Machine, hub: StandInHub
) -> None:
    status, out, err = machine.run("hf://org/tiny")
    hub.requests.clear()
    again = machine.run("hf://org/tiny")

    assert (status, out) == (0, f"{machine.target}\n"), err
    assert "downloading hf://org/tiny@main (25 MB in 3 files)" in err
    names = {path.name for path in machine.target.iterdir()}
    assert names == {"config.json", "tokenizer.json", WEIGHTS, "kvoy-model.json"}
    assert not any(path.is_symlink() for path in machine.target.iterdir())
    manifest = json.loads((machine.target / "kvoy-model.json").read_text())
    assert manifest["source"] == "hf://org/tiny@main"
    assert again[:2] == (0, f"{machine.target}\n")
    assert hub.requests == []


def test_several_at_once_download_once(machine: Machine, hub: StandInHub) -> None:
    processes = [machine.start("hf://org/tiny") for _ in range(3)]
    ends = [process.communicate(timeout=DEADLINE_S) for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0], ends
    assert len(hub.ranges_of(WEIGHTS)) == 1


def test_what_a_killed_download_has_brought_whole_is_kept(
    machine: Machine, hub: StandInHub
) -> None:
    hub.faults.hold_after[WEIGHTS] = 21 * MEGABYTE
    killed = machine.start("hf://org/tiny")
    wait_for_download(machine.target)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=DEADLINE_S)
    hub.faults.release.set()
    assert not machine.target.exists()

    status, _, err = machine.run("hf://org/tiny")

    assert status == 0, err
    assert len(hub.ranges_of("tokenizer.json")) == 1
    assert len(hub.ranges_of(WEIGHTS)) == 2
    assert (machine.target / WEIGHTS).read_bytes() == bytes(24 * MEGABYTE)
    left = sorted(path.name for path in machine.target.parent.iterdir())
    assert left == [".tiny.lock.2", "tiny"]


def test_who_waits_goes_on_when_the_holder_is_killed(machine: Machine, hub: StandInHub) -> None:
    hub.faults.hold_after[WEIGHTS] = 21 * MEGABYTE
    holder = machine.start("hf://org/tiny")
    wait_for_download(machine.target)
    waiting = machine.start("hf://org/tiny")
    assert waiting.stderr is not None
    told = waiting.stderr.readline()

    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=DEADLINE_S)
    hub.faults.release.set()
    _, err = waiting.communicate(timeout=DEADLINE_S)

    assert f"waiting for process {holder.pid} on" in told
    assert waiting.returncode == 0, err
    assert (machine.target / WEIGHTS).read_bytes() == bytes(24 * MEGABYTE)


@pytest.mark.parametrize(
    ("uri", "expected", "words"),
    [
        ("hf://org/none", 3, "the hub has no org/none"),
        ("hf://org/tiny@nope", 3, "no revision 'nope'"),
        ("pvc://claim/folder", 1, "hf://org/name@revision"),
    ],
)
def test_what_does_not_exist_is_one_line_and_a_status(
    machine: Machine, uri: str, expected: int, words: str
) -> None:
    status, out, err = machine.run(uri)

    assert (status, out) == (expected, "")
    (line,) = err.splitlines()
    assert line.startswith("kvoy model: ")
    assert words in line


@pytest.mark.parametrize(
    ("answer", "expected", "words"),
    [
        (401, 4, "HF_TOKEN"),
        (403, 4, "HF_TOKEN"),
        (404, 3, "404"),
        (429, 5, "too many requests"),
        (503, 6, "503"),
    ],
)
def test_a_hub_that_refuses_is_one_line_and_a_status(
    machine: Machine, hub: StandInHub, answer: int, expected: int, words: str
) -> None:
    hub.faults.status = answer

    status, _, err = machine.run("hf://org/tiny")

    assert status == expected, err
    (line,) = err.splitlines()
    assert words in line


def test_a_wrong_token_a_gated_model_and_a_right_token(
    machine: Machine, repository: Repository
) -> None:
    repository.token = "hf_right"
    wrong = machine.run("hf://org/tiny", HF_TOKEN="hf_wrong")
    repository.is_gated = True
    gated = machine.run("hf://org/tiny", HF_TOKEN="hf_right")
    repository.is_gated = False
    right = machine.run("hf://org/tiny", HF_TOKEN="hf_right")

    assert (wrong[0], gated[0], right[0]) == (4, 4, 0), right[2]
    assert "gated" in gated[2]


def test_a_full_disk_a_damaged_file_and_an_absent_hub_have_statuses_of_their_own(
    machine: Machine, hub: StandInHub, tmp_path: Path
) -> None:
    hub.faults.listed_sizes[WEIGHTS] = 1 << 60
    full = machine.run("hf://org/tiny")
    hub.faults.listed_sizes.clear()
    hub.faults.damaged.add(WEIGHTS)
    damaged = machine.run("hf://org/tiny")
    hub.faults.damaged.clear()
    absent = machine.run("hf://org/tiny", HF_ENDPOINT="http://127.0.0.1:1")
    repaired = machine.run("hf://org/tiny")

    assert (full[0], damaged[0], absent[0], repaired[0]) == (7, 8, 6, 0), repaired[2]
    assert "disk space" in full[2]
    assert (machine.target / WEIGHTS).read_bytes() == bytes(24 * MEGABYTE)


def test_the_last_words_of_its_pod_are_its_reason(machine: Machine, tmp_path: Path) -> None:
    words = tmp_path / "termination-log"
    words.touch()

    machine.run(
        "hf://org/none", KUBERNETES_SERVICE_HOST="10.96.0.1", KVOY_TERMINATION_LOG=str(words)
    )

    assert words.read_text().startswith("ModelLoadFailed: the hub has no org/none")


def test_a_folder_that_is_something_else_is_left_alone(
    machine: Machine, repository: Repository
) -> None:
    machine.target.mkdir(parents=True)
    (machine.target / "mine").write_text("keep")
    foreign = machine.run("hf://org/tiny")
    (machine.target / "mine").unlink()
    good = machine.run("hf://org/tiny", "--revision", "main")
    repository.branches = ("main", "v2")
    other = machine.run("hf://org/tiny@v2")

    assert (foreign[0], good[0], other[0]) == (1, 0, 1), good[2]
    assert "was not made by" in foreign[2]
    assert "holds hf://org/tiny@main" in other[2]


def test_two_different_revisions_are_refused(machine: Machine) -> None:
    status, _, err = machine.run("hf://org/tiny@v1", "--revision", "v2")

    assert status == 1
    assert "--revision v2" in err


def test_it_needs_nothing_that_an_image_of_the_engine_lacks() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(['rich', 'psutil']); "
        "from kvoy_cli.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "model", "fetch", "--help"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )

    assert done.returncode == 0, done.stderr
    assert "Exit status" in done.stdout
