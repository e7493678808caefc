"""A prepared model folder: whole, with a manifest, or absent.

A folder is built beside its place and renamed, under a lock, so an interrupted preparation leaves
nothing that looks whole and two processes never prepare the same model at once. Knows folders and
manifests; not where models come from. Used by `model_store`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvoy_engine import shared_lock
from kvoy_engine.model_errors import ModelSourceError

MANIFEST = "kvoy-model.json"
_PARTIAL_IDENTITY = ".kvoy-partial"
"""In a folder that is being built, when the next build may go on with it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a prepared model folder says of itself."""

    source: str
    """The reference that it was made from."""
    identity: str
    """What its weights and tokenizer are, for ever: a commit, or a digest and a conversion."""
    files: dict[str, int] = field(default_factory=dict)
    """Name to size in bytes."""


def read_manifest(folder: Path) -> Manifest | None:
    """What a prepared folder says of itself; None for a folder that Kvoy did not prepare."""
    try:
        return Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (TypeError, ValueError) as error:
        raise ModelSourceError(f"{folder / MANIFEST} is damaged; remove {folder}") from error


def is_prepared(folder: Path) -> bool:
    """Whether the folder has a manifest and every file that it names, at its size."""
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    sizes = {name: _size(folder / name) for name in manifest.files}
    return sizes == manifest.files


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def prepare(
    target: Path,
    source: str,
    identity: str,
    build: Callable[[Path], None],
    progress: Callable[[str], None],
    *,
    is_resumable: bool = False,
) -> Path:
    """`target` with this identity: as it is when whole, else built aside and renamed into place.

    What an interrupted resumable build left is given to the next one of the same identity; else it
    is removed.
    """
    if is_current(target, identity):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock_path = target.with_name(f".{target.name}.lock")
    with shared_lock.hold(
        lock_path, lambda owner: progress(f"waiting for {owner}, which prepares {target.name}")
    ) as lock:
        if is_current(target, identity):
            return target
        partial = target.with_name(f".{target.name}.partial")
        if not (is_resumable and _partial_identity(partial) == identity):
            # Under the lock: whoever left it was interrupted.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        if is_resumable:
            (partial / _PARTIAL_IDENTITY).write_text(identity, encoding="utf-8")
        try:
            build(partial)
            (partial / _PARTIAL_IDENTITY).unlink(missing_ok=True)
            _check(lock, target)
            _write_manifest(partial, source, identity)
            _replace_folder(partial, target)
        except BaseException:
            if not is_resumable:
                shutil.rmtree(partial, ignore_errors=True)
            raise
    return target


def _check(lock: shared_lock.HeldLock, target: Path) -> None:
    try:
        lock.check()
    except shared_lock.LockLost:
        raise ModelSourceError(
            f"another process took over {target}: this one was silent for too long"
        ) from None


def _partial_identity(partial: Path) -> str | None:
    try:
        return (partial / _PARTIAL_IDENTITY).read_text(encoding="utf-8")
    except OSError:
        return None


def is_current(target: Path, identity: str) -> bool:
    return is_prepared(target) and manifest_of(target).identity == identity


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None, folder
    return manifest


def _write_manifest(folder: Path, source: str, identity: str) -> None:
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    text = json.dumps(asdict(Manifest(source, identity, files)), indent=2)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _replace_folder(new: Path, target: Path) -> None:
    """Rename `new` to `target`; an older `target` is moved out of the way first and removed."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
