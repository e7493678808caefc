"""The kind cluster's file, read by kind itself. Nothing here starts a cluster: it takes Docker."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvoy_cluster import build
from kvoy_cluster.go_modules import GoModule

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parent.parent.parent / "deploy" / "kind" / "cluster.yaml"
KIND = GoModule("kind", "sigs.k8s.io/kind", "sigs.k8s.io/kind")


def complaint(config: Path, home: Path) -> str:
    """What kind says where it finds no Docker; it reads the file before it looks for that."""
    done = subprocess.run(
        [str(build.build([KIND]).program("kind")), "create", "cluster", "--config", str(config)],
        capture_output=True,
        text=True,
        env={"PATH": "/nonexistent", "HOME": str(home)},
        check=False,
    )
    assert done.returncode != 0
    return done.stderr


def test_kind_reads_the_cluster_s_file(tmp_path: Path) -> None:
    assert "failed to get docker info" in complaint(CONFIG, tmp_path)


def test_kind_would_say_what_is_wrong_with_it(tmp_path: Path) -> None:
    wrong = tmp_path / "cluster.yaml"
    wrong.write_text(CONFIG.read_text().replace("nodes:", "knots:"))

    assert "field knots not found" in complaint(wrong, tmp_path)
