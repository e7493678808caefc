"""Files that are replaced, taken away, and made readable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoy_router.watched_file import WatchedFile


def test_a_file_is_read_once_for_every_change(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    file = WatchedFile(path)

    assert file.read_if_changed() == "one"
    assert file.read_if_changed() is None
    other = tmp_path / "other"
    other.write_text("two")
    os.replace(other, path)
    assert file.read_if_changed() == "two"
    assert file.read_if_changed() is None


def test_a_file_that_is_gone_is_told_once_and_read_when_it_is_back(tmp_path: Path) -> None:
    file = WatchedFile(tmp_path / "file")

    with pytest.raises(FileNotFoundError):
        file.read_if_changed()
    assert file.read_if_changed() is None
    file.path.write_text("back")
    assert file.read_if_changed() == "back"


def test_a_change_of_rights_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    file = WatchedFile(path)
    file.read_if_changed()

    path.chmod(0o600)

    assert file.read_if_changed() == "text"
