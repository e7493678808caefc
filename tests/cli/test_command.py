"""The `kvoy` command itself: finding sub-commands, and saying plainly what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvoy_cli import __main__ as command
from kvoy_cli.errors import CommandError


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status = command.main(["--help"])

    assert status == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in command.COMMANDS)


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvoy 0.")


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["dance"]) == 2
    assert "no command 'dance'" in capsys.readouterr().err


def test_help_imports_no_component() -> None:
    code = (
        "import sys; from kvoy_cli.__main__ import main; main(['--help'])\n"
        "heavy = {'torch', 'rich', 'grpc', 'fastapi', 'kvoy_engine', 'kvoy_router', 'psutil'}\n"
        "print('imported', heavy & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.endswith("imported set()\n")


def test_a_missing_package_names_the_extra_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_: command.Command) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(command, "_load", load)

    status = command.main(["serve", "x"])

    assert status == 1
    assert capsys.readouterr().err == (
        "kvoy serve: torch is not installed: pip install 'kvoy[engine]'\n"
    )


def test_a_command_s_refusal_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(argv: list[str]) -> int:
        raise CommandError("the sea is too rough")

    monkeypatch.setattr(command, "_load", lambda _: refuse)

    assert command.main(["up"]) == 1
    assert capsys.readouterr().err == "kvoy up: the sea is too rough\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["up"],
        ["serve"],
        ["router"],
        ["chat"],
        ["bench"],
        ["model"],
        ["model", "list"],
        ["model", "add"],
        ["model", "convert"],
    ],
)
def test_every_command_has_help(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvoy_cli", *arguments, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
