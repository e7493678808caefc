"""Where a test cluster keeps what outlives it, and where its parts lie in the repository."""

from __future__ import annotations

import os
from pathlib import Path

GO_MODULES = Path(__file__).parents[1] / "go"
"""One folder per Go module that pins, and builds, some of the programs."""
REPOSITORY = Path(__file__).parents[3]


def cluster_home() -> Path:
    """`$KVOY_HOME/cluster`, by default `~/.cache/kvoy/cluster`; made if missing."""
    home = os.environ.get("KVOY_HOME") or Path.home() / ".cache" / "kvoy"
    folder = Path(home).absolute() / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
