import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvoy_contract.settings import Settings, read_settings, setting


@dataclass(frozen=True)
class Example:
    model: str = setting(help="what to serve", positional=True)
    port: int = setting(8000, help="of HTTP")
    rate: float | None = setting(None, help="50 % of it")
    fast: bool = setting(False, help="or slow")
    policy: str = setting("best", choices=("best", "worst"), help="which one")
    engines: tuple[str, ...] = setting((), flag="engine", help="addresses")

    def __post_init__(self) -> None:
        if self.port < 1:
            raise ValueError(f"port is {self.port}, below 1")


def read(*argv: str) -> Example:
    return read_settings(Example, "example", "An example.", argv)


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "PORT", "RATE", "FAST", "POLICY", "ENGINE"):
        monkeypatch.delenv(f"KVOY_{name}", raising=False)


def test_flags_set_fields_of_every_type() -> None:
    example = read("m", "--port", "1", "--rate", "2", "--fast", "--engine", "a", "b")

    assert example == Example("m", 1, 2.0, True, "best", ("a", "b"))


def test_what_is_not_given_has_its_default() -> None:
    assert read("m") == Example("m")


def test_a_flag_goes_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kvoy.yaml"
    file.write_text("port: 1\nrate: 1\nfast: true\nengine: [a, b]\n")
    monkeypatch.setenv("KVOY_PORT", "2")
    monkeypatch.setenv("KVOY_RATE", "2")

    example = read("m", "--config", str(file), "--port", "3")

    assert example == Example("m", 3, 2.0, True, "best", ("a", "b"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["m", "--port", "x"], "--port"),
        (["m", "--port", "0"], "port is 0"),
        (["m", "--policy", "none"], "--policy"),
        (["m", "--no-such-flag", "1"], "--no-such-flag"),
        ([], "MODEL"),
    ],
)
def test_a_wrong_value_ends_with_its_name(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(*argv)

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert line.endswith("; see example --help")


def test_an_unknown_key_of_the_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvoy.yaml"
    file.write_text("prot: 1\n")

    with pytest.raises(SystemExit):
        read("m", "--config", str(file))

    assert "prot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "prot: unknown key; port is one"),
        ("[port]", "must hold `key: value` lines"),
        ("", "the file is empty"),
        ("port: 1\nport: 2", "port: is given twice"),
        ("port: {a: 1}", "port: must be a whole number, not {'a': 1}"),
        ("port: true", "port: must be a whole number, not True"),
        ("port: 1.5", "port: must be a whole number, not 1.5"),
        ("port: null", "port: must be a whole number, not None"),
        ("rate: much", "rate: must be a number, not 'much'"),
        ("fast: 1", "fast: must be true or false, not 1"),
        (
            "engine: [a, 3]",
            "engine: must be a text (in quotes, where it looks like something else)",
        ),
        ("policy: 7", "policy: must be a text (in quotes, where it looks like something else)"),
        ("policy: none", "--policy"),
        ("model: m", "model: unknown key"),
        ("port: 0", "port is 0, below 1"),
        ("port: [", "not YAML: line 1, column 8"),
    ],
)
def test_a_new_text_of_the_file_is_refused_by_the_name_of_its_key(text: str, words: str) -> None:
    settings = Settings(Example, "example", "An example.", ["m"])

    with pytest.raises(ValueError, match=re.escape(words)):
        settings.reread(text)


def test_a_new_text_of_the_file_counts_below_the_flags_and_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kvoy.json"
    file.write_text('{"port": 1}')
    monkeypatch.setenv("KVOY_RATE", "2")
    settings = Settings(Example, "example", "An example.", ["m", "--config", str(file), "--fast"])
    monkeypatch.setenv("KVOY_RATE", "3")

    again = settings.reread("port: 5\nrate: 1e3\nfast: false\nengine: a")

    assert settings.file == file
    assert settings.values == Example("m", 1, 2.0, True)
    assert again == Example("m", 5, 2.0, True, engines=("a",))


def test_help_names_every_flag_and_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")

    text = capsys.readouterr().out
    for word in ("--port", "KVOY_PORT", "--no-fast", "50 % of it", "(default: 8000)"):
        assert word in text


def test_mutable_defaults_are_refused() -> None:
    with pytest.raises(TypeError):
        setting([], help="x")
