"""Where caches lie when a container has no home folder, or one that cannot be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvoy_engine.home import provide_folders


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def no_home(tmp_path: Path) -> str:
    """A file: nothing can be made in it, whoever asks."""
    (tmp_path / "home").touch()
    return str(tmp_path / "home")


def test_a_usual_home_stays_as_it_is(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}

    assert provide_folders(environment) == {}
    assert environment == {"HOME": str(tmp_path)}


def test_without_a_home_caches_go_to_an_own_temporary_folder(temporary: Path, no_home: str) -> None:
    environment = {"HOME": no_home}

    chosen = provide_folders(environment)

    own = temporary / f"kvoy-{os.getuid()}"
    assert chosen == {"KVOY_HOME": str(own), "HF_HOME": str(own / "huggingface")}
    assert environment == {"HOME": no_home, **chosen}
    assert own.stat().st_mode & 0o777 == 0o700


def test_the_hubs_cache_follows_a_given_home_of_ours(no_home: str) -> None:
    environment = {"HOME": no_home, "KVOY_HOME": "/var/lib/kvoy"}

    assert provide_folders(environment) == {"HF_HOME": "/var/lib/kvoy/huggingface"}


@pytest.mark.parametrize("name", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_a_given_cache_of_the_hub_is_kept(no_home: str, name: str) -> None:
    environment = {"HOME": no_home, "KVOY_HOME": "/var/lib/kvoy", name: "/somewhere"}

    assert provide_folders(environment) == {}


def test_a_temporary_folder_that_somebody_prepared_is_not_used(
    temporary: Path, no_home: str
) -> None:
    (temporary / f"kvoy-{os.getuid()}").symlink_to("/etc")

    assert provide_folders({"HOME": no_home}) == {}
