"""Models of a hub: a stand-in on loopback, and the real huggingface_hub in a child process.

A child, because huggingface_hub reads its environment once, when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoy_engine.hub_testing import Repository, StandInHub

pytestmark = pytest.mark.slow

MEGABYTE = 1 << 20
COMMIT = "c0ffee" + "0" * 34
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
RESOLVE = """
import sys
from pathlib import Path
from kvoy_engine.model_errors import ModelSourceError
from kvoy_engine.model_store import resolve
try:
    folder = Path(sys.argv[2]) if sys.argv[2:] else None
    print(resolve(sys.argv[1], lambda text: None, download_dir=folder))
except ModelSourceError as error:
    sys.exit(f"refused: {error}")
"""


class Machine:
    """A machine with an empty cache that knows the hub's address."""

    def __init__(self, folder: Path, hub_url: str) -> None:
        self._folder = folder
        self._url = hub_url

    def resolve(
        self, reference: str, *download_dir: str, **environment: str
    ) -> tuple[Path | None, str]:
        """(folder, what was said in refusal)."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        own |= {"HF_ENDPOINT": self._url, "HF_HOME": str(self._folder / "hf")}
        own |= {"KVOY_HOME": str(self._folder / "kvoy"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE, reference, *download_dir],
            env=own | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode == 0:
            return Path(done.stdout.strip()), ""
        assert "refused: " in done.stderr, done.stderr
        return None, done.stderr.rpartition("refused: ")[2].strip()


@pytest.fixture
def repository() -> Repository:
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    return Repository(
        {
            "config.json": b"{}",
            "tokenizer.json": b'{"version": "1.0"}',
            "tokenizer_config.json": b"{}",
            "model.safetensors.index.json": json.dumps(index).encode(),
            SHARDS[0]: bytes(24 * MEGABYTE),
            SHARDS[1]: b"\1" * 8192,
            "consolidated.safetensors": b"\2" * 8192,
            "pytorch_model.bin": b"\3" * 8192,
            "README.md": b"hello",
        },
        commit=COMMIT,
    )


@pytest.fixture
def hub(repository: Repository) -> Iterator[StandInHub]:
    with StandInHub({"org/tiny": repository}) as running:
        yield running


@pytest.fixture
def machine(tmp_path: Path, hub: StandInHub) -> Machine:
    return Machine(tmp_path, hub.url)


def test_only_the_needed_files_come_and_the_commit_is_recorded(
    machine: Machine, hub: StandInHub
) -> None:
    folder, refusal = machine.resolve("hf://org/tiny@main")

    assert folder is not None, refusal
    manifest = json.loads((folder / "kvoy-model.json").read_text())
    assert manifest["identity"] == f"hf://org/tiny@{COMMIT}"
    assert set(manifest["files"]) == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        *SHARDS,
    }
    assert (folder / SHARDS[0]).stat().st_size == 24 * MEGABYTE
    assert not hub.ranges_of("pytorch_model.bin")
    assert not hub.ranges_of("consolidated.safetensors")


def test_a_second_start_transfers_nothing_and_an_offline_one_asks_nobody(
    machine: Machine, hub: StandInHub
) -> None:
    first, _ = machine.resolve("hf://org/tiny")
    hub.requests.clear()

    second, _ = machine.resolve("hf://org/tiny")
    asked = [path for method, path, _ in hub.requests if "/resolve/" in path]
    hub.requests.clear()
    offline, refusal = machine.resolve("hf://org/tiny", HF_HUB_OFFLINE="1")

    assert first == second == offline, refusal
    assert asked == []
    assert hub.requests == []


def test_a_transfer_that_breaks_off_goes_on_where_it_broke(
    machine: Machine, hub: StandInHub
) -> None:
    hub.faults.cut_after[SHARDS[0]] = 21 * MEGABYTE

    folder, refusal = machine.resolve("hf://org/tiny")

    assert folder is not None, refusal
    first, second = hub.ranges_of(SHARDS[0])
    assert first is None
    assert second is not None
    assert int(second.removeprefix("bytes=").rstrip("-")) >= 10 * MEGABYTE
    assert (folder / SHARDS[0]).read_bytes() == bytes(24 * MEGABYTE)


def test_a_damaged_file_is_refused_and_fetched_again(machine: Machine, hub: StandInHub) -> None:
    hub.faults.damaged.add(SHARDS[1])
    damaged, refusal = machine.resolve("hf://org/tiny")
    hub.faults.damaged.clear()

    repaired, second_refusal = machine.resolve("hf://org/tiny")

    assert damaged is None
    assert "checksum" in refusal
    assert repaired is not None, second_refusal
    assert (repaired / SHARDS[1]).read_bytes() == b"\1" * 8192


def test_a_private_repository_needs_the_token(machine: Machine, repository: Repository) -> None:
    repository.token = "hf_secret"

    without, refusal = machine.resolve("hf://org/tiny")
    with_token, second_refusal = machine.resolve("hf://org/tiny", HF_TOKEN="hf_secret")

    assert without is None
    assert "HF_TOKEN" in refusal
    assert with_token is not None, second_refusal


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("hf://org/none", "no org/none"),
        ("hf://org/tiny@nope", "no revision 'nope'"),
        ("hf://org", "form hf://org/name@revision"),
    ],
)
def test_what_does_not_exist_is_named(machine: Machine, reference: str, words: str) -> None:
    folder, refusal = machine.resolve(reference)

    assert folder is None
    assert words in refusal


def test_a_gated_repository_says_what_to_do(machine: Machine, repository: Repository) -> None:
    repository.is_gated = True

    _, refusal = machine.resolve("hf://org/tiny")

    assert "gated" in refusal


def test_offline_without_the_files_is_said(machine: Machine) -> None:
    _, refusal = machine.resolve("hf://org/tiny", HF_HUB_OFFLINE="1")

    assert "HF_HUB_OFFLINE" in refusal


def test_a_hub_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "http://127.0.0.1:1")

    _, refusal = machine.resolve("hf://org/tiny")

    assert "cannot reach the hub" in refusal


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SHARDS[1]])
def test_a_repository_that_lacks_a_needed_file_is_refused_by_its_name(
    machine: Machine, repository: Repository, name: str
) -> None:
    del repository.files[name]

    _, refusal = machine.resolve("hf://org/tiny")

    assert name in refusal


def test_a_download_folder_holds_the_files_themselves_and_is_asked_first(
    machine: Machine, hub: StandInHub, tmp_path: Path
) -> None:
    shared = str(tmp_path / "shared")

    first, refusal = machine.resolve("hf://org/tiny", shared)
    hub.requests.clear()
    second, _ = machine.resolve("hf://org/tiny", shared)

    assert first == second == tmp_path / "shared" / "org--tiny@main", refusal
    assert not any(path.is_symlink() for path in first.rglob("*"))
    assert (first / SHARDS[1]).read_bytes() == b"\1" * 8192
    assert hub.requests == []
    cached = [path for path in (tmp_path / "hf").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in cached) < MEGABYTE, "no second copy"
