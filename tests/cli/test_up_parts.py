"""What `kvoy up` decides before anything runs, and how it shows progress."""

from __future__ import annotations

import importlib.util
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from kvoy_cli import up
from kvoy_cli.console import Reporter
from kvoy_cli.errors import CommandError
from kvoy_cli.up_config import UpConfig


def reporter(is_terminal: bool) -> tuple[Reporter, io.StringIO]:
    output = io.StringIO()
    return Reporter(Console(file=output, force_terminal=is_terminal, width=80)), output


def test_without_a_terminal_progress_is_plain_lines_each_said_once() -> None:
    report, output = reporter(is_terminal=False)

    with report.tasks() as new_task:
        task = new_task("getting it")
        task.say("getting it")
        task.note("half")
        task.fraction(0.5)
        task.say("turning it [over]")
        task.done("got [it]")

    assert output.getvalue().splitlines() == ["getting it", "turning it [over]", "✓ got [it]"]


def test_on_a_terminal_the_last_line_stays() -> None:
    report, output = reporter(is_terminal=True)

    with report.tasks() as new_task:
        task = new_task("getting [it]")
        task.note("half [x]")
        task.fraction(0.5)
        task.done("got it")

    assert "✓" in output.getvalue()
    assert "got it" in output.getvalue()


def test_a_missing_package_is_named_with_its_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )

    up.check_installed(UpConfig(runner="sim"))
    with pytest.raises(CommandError, match=r"torch; pip install 'kvoy\[cli,engine\]'"):
        up.check_installed(UpConfig())


@pytest.mark.parametrize(
    ("available", "engines", "expected"),
    [
        (64 << 30, 2, up.MAX_KV_BYTES),
        (4 << 30, 2, 1 << 30),
        (1 << 20, 8, up.MIN_KV_BYTES),
    ],
)
def test_engines_share_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, available: int, engines: int, expected: int
) -> None:
    memory = SimpleNamespace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    assert up.default_kv_bytes(engines) == expected


def test_old_logs_are_removed_and_new_ones_kept(tmp_path: Path) -> None:
    for index in range(15):
        (tmp_path / f"up-20200101-0000{index:02}-1").mkdir()

    folder = up.new_log_folder(tmp_path)

    kept = sorted(tmp_path.iterdir())
    assert len(kept) == up.KEPT_LOG_FOLDERS
    assert kept[-1] == folder


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))

    with pytest.raises(CommandError, match="no disk space is left"):
        up.new_log_folder(tmp_path)
