"""A prepared model folder: whole, with a manifest, or absent.

A folder is built beside its place and renamed, under a lock, so an interrupted preparation leaves
nothing that looks whole and two processes never prepare the same model at once. Knows folders and
manifests; not where models come from. Used by `model_store`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvoy_engine.model_errors import ModelSourceError

MANIFEST = "kvoy-model.json"


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
) -> Path:
    """`target` with this identity: as it is when whole, else built aside and renamed into place."""
    if is_current(target, identity):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(f".{target.name}.lock"), target.name, progress):
        if is_current(target, identity):
            return target
        partial = target.with_name(f".{target.name}.partial")
        # Under the lock: whoever left it was interrupted.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            build(partial)
            _write_manifest(partial, source, identity)
            _replace_folder(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return target


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


@contextlib.contextmanager
def _lock(path: Path, name: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file; the kernel frees it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
