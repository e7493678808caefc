"""The cache folder: models, kernels, logs and tools live under it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from kvoy_engine.model_errors import ModelSourceError

HOME_VARIABLE = "KVOY_HOME"
_HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")


def home() -> Path:
    """`$KVOY_HOME`, or `~/.cache/kvoy`. Raises ModelSourceError for a user without a home."""
    given = os.environ.get(HOME_VARIABLE)
    try:
        return Path(given).expanduser() if given else Path.home() / ".cache" / "kvoy"
    except RuntimeError:
        raise ModelSourceError(f"this user has no home folder; set {HOME_VARIABLE}") from None


def provide_folders(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Name folders that can be written where the usual ones cannot; what was set, by variable.

    A container often has a user without a home, or a root file system that is read-only. Our cache
    then lies in the temporary folder, and the hub's in ours. For composition roots, before
    huggingface_hub is imported: it reads its variables once.
    """
    chosen: dict[str, str] = {}
    if HOME_VARIABLE not in environment and not _can_write(_usual(environment, "kvoy")):
        with contextlib.suppress(OSError):  # whoever needs it will say that there is none
            chosen[HOME_VARIABLE] = str(_own_temporary_folder())
    if not any(name in environment for name in _HUB_VARIABLES) and not _can_write(
        _usual(environment, "huggingface")
    ):
        ours = chosen.get(HOME_VARIABLE) or environment.get(HOME_VARIABLE)
        if ours is not None:
            chosen["HF_HOME"] = str(Path(ours) / "huggingface")
    environment.update(chosen)
    return chosen


def _usual(environment: MutableMapping[str, str], name: str) -> Path | None:
    folder = environment.get("HOME")
    try:
        return (Path(folder) if folder else Path.home()) / ".cache" / name
    except RuntimeError:
        return None


def _can_write(folder: Path | None) -> bool:
    """Whether files can be made in it, or the folder itself in what is there of its path."""
    if folder is None:
        return False
    existing = folder
    while not existing.exists():
        existing = existing.parent
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _own_temporary_folder() -> Path:
    """Nobody else's: what it holds is loaded and run. Raises OSError."""
    folder = Path(tempfile.gettempdir()) / f"kvoy-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder
