"""Where a run's time went, as its last lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvoy_times import Times, folder_of

_SLOW_FIXTURE = """
import pytest, kvoy_times

kvoy_times._LONG_FIXTURE_S = 0.01


@pytest.fixture(scope="session")
def cluster():
    import time
    time.sleep(0.02)


def test_first(cluster): pass
def test_second(cluster): pass
"""


@pytest.mark.parametrize(
    ("nodeid", "folder"),
    [
        ("tests/router/test_pool.py::test_x[a/b]", "tests/router"),
        ("tests/router/deep/test_pool.py::test_x", "tests/router"),
        ("tests/test_layout.py::test_x", "tests"),
        ("test_x.py::test_x", "."),
    ],
)
def test_a_test_counts_for_its_top_folder(nodeid: str, folder: str) -> None:
    assert folder_of(nodeid) == folder


def test_phases_add_up_and_the_longest_folder_comes_first() -> None:
    times = Times()
    times.add_phase("tests/a/test_a.py::test", 1.0)
    times.add_phase("tests/b/test_b.py::test", 2.0)
    times.add_phase("tests/a/test_a.py::test", 3.0)
    times.add_fixture("cluster", 40.0)
    times.add_fixture("cluster", 2.0)

    assert [line.split() for line in times.lines()] == [
        ["4.0", "s", "tests/a"],
        ["2.0", "s", "tests/b"],
        ["42.0", "s", "to", "set", "up", "cluster"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_ends_with_its_times_also_side_by_side(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_it.py").write_text(_SLOW_FIXTURE)
    command = [sys.executable, "-m", "pytest", "-p", "kvoy_times", f"--numprocesses={workers}"]

    done = subprocess.run(
        [*command, "--dist=loadfile", "--rootdir=.", "-c/dev/null", "test_it.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "seconds by folder of tests" in done.stdout
    assert done.stdout.count("to set up cluster of test_it.py") == 1
