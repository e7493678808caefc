"""The cache folder: models, kernels, logs and tools live under it."""

from __future__ import annotations

import os
from pathlib import Path

HOME_VARIABLE = "KVOY_HOME"


def home() -> Path:
    """`$KVOY_HOME`, or `~/.cache/kvoy`."""
    given = os.environ.get(HOME_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "kvoy"
