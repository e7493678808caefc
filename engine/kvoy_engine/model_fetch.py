"""A hub's model in a folder of its own: whole, verified, and for everybody who mounts it.

`kvoy model fetch` fills a volume with it, and `kvoy serve --download-dir` a folder of a node. The
folder holds the files themselves, no links, so that it can be read wherever it is mounted. Of
processes, pods and nodes that want it at once one downloads; what an interrupted one has brought
whole is kept for the next. What is there is taken as it is: the hub is not asked again, also when
its branch has moved.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from kvoy_engine import hub
from kvoy_engine.model_errors import Cause, ModelSourceError
from kvoy_engine.model_folder import is_prepared, prepare, read_manifest


def fetch(
    reference: hub.HubReference,
    target: Path,
    progress: Callable[[str], None],
    on_fraction: Callable[[float], None],
) -> Path:
    """`target` with the model in it. Raises ModelSourceError."""
    try:
        if _holds(target, reference):
            return target
        commit = hub.resolve_commit(reference)
        return prepare(
            target,
            str(reference),
            str(hub.HubReference(reference.repo, commit)),
            lambda folder: hub.fetch_into(folder, reference, commit, progress, on_fraction),
            progress,
            is_resumable=True,
        )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelSourceError(f"no disk space is left for {target}", Cause.NO_SPACE) from error
        raise ModelSourceError(f"cannot write {target}: {error.strerror}") from error


def folder_for(reference: hub.HubReference, download_dir: Path) -> Path:
    """Where a folder of many models has this one."""
    name = f"{reference.repo}@{reference.revision}".replace("/", "--")
    return download_dir / name


def _holds(target: Path, reference: hub.HubReference) -> bool:
    """Raises ModelSourceError for a folder that is something else."""
    manifest = read_manifest(target)
    if manifest is None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelSourceError(f"{target} exists and was not made by `kvoy model fetch`")
    if manifest is not None and manifest.source != str(reference):
        raise ModelSourceError(f"{target} holds {manifest.source}; choose another folder")
    return manifest is not None and is_prepared(target)
