"""One dataclass gives flags, environment and file, with one order of precedence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvoy_contract.settings import read_settings, setting


@dataclass(frozen=True)
class Config:
    name: str = setting("a", help="a name")
    num_things: int = setting(1, help="how many")
    limit: float | None = setting(None, help="at most")
    address: tuple[str, ...] = setting((), help="where; repeatable")
    is_loud: bool = setting(False, help="whether")


def read(*argv: str) -> Config:
    return read_settings(Config, "prog", "A test.", argv)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "NAME", "NUM_THINGS", "LIMIT", "ADDRESS", "IS_LOUD"):
        monkeypatch.delenv(f"KVOY_{name}", raising=False)


def test_defaults_come_from_the_dataclass() -> None:
    assert read() == Config("a", 1, None, (), False)


def test_a_repeated_flag_adds_up() -> None:
    assert read("--address", "a", "b", "--address", "c").address == ("a", "b", "c")


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("name: file\nnum-things: 5\nlimit: 0.5\naddress: [x, y]\n")
    monkeypatch.setenv("KVOY_NAME", "environment")
    monkeypatch.setenv("KVOY_NUM_THINGS", "7")

    config = read("--config", str(file), "--name", "flag")

    assert config == Config("flag", 7, 0.5, ("x", "y"), False)


def test_an_unknown_key_of_the_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("nmae: typo\n")

    with pytest.raises(SystemExit) as stopped:
        read("--config", str(file))

    assert stopped.value.code == 2
    assert "nmae" in capsys.readouterr().err
