"""Model folders from a Hugging Face hub: `hf://org/name@revision`.

huggingface_hub does the transfers, with its own cache (`HF_HOME`), token (`HF_TOKEN`), endpoint
(`HF_ENDPOINT`) and offline mode (`HF_HUB_OFFLINE`): files that are whole are kept, and a broken
connection goes on where it broke. This module resolves the moving revision to a commit, chooses the
files that an engine needs, checks what came against the hub's checksums, and says in one sentence
why something cannot be had.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoy_engine.model_errors import Cause, ModelSourceError

SCHEME = "hf://"
_REFERENCE = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_REQUIRED = ("config.json", "tokenizer.json")
_OPTIONAL = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubReference:
    repo: str
    revision: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit, as the hub lists it."""

    name: str
    size: int
    sha256: str | None
    """Of large files; small ones have their git blob id alone."""
    blob_id: str | None


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """A model's needed files of one commit, all on this machine."""

    folder: Path
    commit: str
    files: tuple[str, ...]


def parse_reference(text: str) -> HubReference:
    """`hf://org/name` (revision main) or `hf://org/name@revision`. Raises ModelSourceError."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ModelSourceError(f"{text!r} is not of the form hf://org/name@revision")
    return HubReference(match["repo"], match["revision"] or "main")


def resolve_commit(reference: HubReference) -> str:
    """The commit that the reference names now; offline, that of the hub's cache.

    Raises ModelSourceError.
    """
    from huggingface_hub import HfApi, constants

    if _COMMIT.fullmatch(reference.revision):
        return reference.revision
    if constants.HF_HUB_OFFLINE:
        return cached(reference).commit
    info = _ask(reference, lambda: HfApi().model_info(reference.repo, revision=reference.revision))
    return str(info.sha)


def fetch(
    reference: HubReference,
    commit: str,
    progress: Callable[[str], None],
    on_fraction: Callable[[float], None],
) -> HubSnapshot:
    """Bring the needed files of that commit into the hub's cache, verified.

    In offline mode they must be there already. Raises ModelSourceError.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return cached(reference)
    files = _needed(reference, commit)
    progress(_downloading(reference, files))
    check_space(Path(constants.HF_HUB_CACHE), sum(file.size for file in files))
    folder = _download(reference, files, on_fraction)
    if folder.name != commit:
        raise ModelSourceError(f"{reference} moved to another commit meanwhile; try again")
    progress(f"checking {len(files)} files of {reference}")
    for file in files:
        verify(folder / file.name, file)
    return HubSnapshot(folder, commit, tuple(sorted(file.name for file in files)))


def fetch_into(
    folder: Path,
    reference: HubReference,
    commit: str,
    progress: Callable[[str], None],
    on_fraction: Callable[[float], None],
) -> None:
    """Bring the needed files of that commit into `folder` itself, verified.

    Whole files that an earlier call left there are kept. Raises ModelSourceError.
    """
    for broken in folder.rglob("*.incomplete"):
        broken.unlink()  # the hub's library begins files of another process anew
    pinned = HubReference(reference.repo, commit)
    files = _needed(pinned, commit)
    progress(_downloading(reference, files))
    present = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    check_space(folder, sum(file.size for file in files) - present)
    _download(pinned, files, on_fraction, folder)
    progress(f"checking {len(files)} files of {reference}")
    for file in files:
        verify(folder / file.name, file)
    # What the hub's library notes there, to go on with.
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def _needed(reference: HubReference, commit: str) -> list[HubFile]:
    listed = _list_files(HubReference(reference.repo, commit))
    names = needed_files(reference, listed, lambda: _read_index(reference, commit))
    return [file for file in listed if file.name in names]


def _downloading(reference: HubReference, files: list[HubFile]) -> str:
    size = sum(file.size for file in files)
    return f"downloading {reference} ({size / 1e6:,.0f} MB in {len(files)} files)"


def cached(reference: HubReference) -> HubSnapshot:
    """The snapshot that the hub's cache holds; asks no network. Raises ModelSourceError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # One file alone: the cache needs not hold what no engine reads.
        found = snapshot_download(
            reference.repo,
            revision=reference.revision,
            local_files_only=True,
            allow_patterns="config.json",
        )
        folder = Path(found)
        present = [
            HubFile(str(path.relative_to(folder)), 0, None, None) for path in folder.rglob("*")
        ]
        names = needed_files(reference, present, lambda: (folder / INDEX_FILE).read_text())
    except (LocalEntryNotFoundError, OSError, ModelSourceError) as error:
        raise ModelSourceError(
            f"{reference} is not whole in the hub's cache, and the hub is offline (HF_HUB_OFFLINE)"
        ) from error
    if not _COMMIT.fullmatch(folder.name):
        raise ModelSourceError(f"the hub's cache names no commit for {reference}: {folder}")
    return HubSnapshot(folder, folder.name, tuple(sorted(names)))


def needed_files(
    reference: HubReference, listed: Sequence[HubFile], read_index: Callable[[], str]
) -> set[str]:
    """The names of the files that an engine reads, of all that a commit has.

    Raises ModelSourceError naming what the repository lacks.
    """
    names = {file.name for file in listed}
    for name in _REQUIRED:
        if name not in names:
            raise ModelSourceError(f"{reference} has no {name}, which Kvoy needs", Cause.NOT_FOUND)
    chosen = {*_REQUIRED, *(names & set(_OPTIONAL))}
    if INDEX_FILE in names:
        shards = set(json.loads(read_index())["weight_map"].values())
        missing = sorted(shards - names)
        if missing:
            raise ModelSourceError(
                f"{reference} lacks {missing[0]}, which its index names", Cause.NOT_FOUND
            )
        return chosen | shards | {INDEX_FILE}
    if SINGLE_FILE not in names:
        raise ModelSourceError(f"{reference} has no weights in safetensors format", Cause.NOT_FOUND)
    return chosen | {SINGLE_FILE}


def verify(path: Path, file: HubFile) -> None:
    """Compare a downloaded file with the hub's checksum; a wrong one is removed from the cache.

    Raises ModelSourceError.
    """
    if file.sha256 is not None:
        is_right = _digest(path, hashlib.sha256()) == file.sha256
    elif file.blob_id is not None:
        header = b"blob %d\0" % path.stat().st_size
        is_right = _digest(path, hashlib.sha1(header, usedforsecurity=False)) == file.blob_id
    else:
        is_right = path.stat().st_size == file.size
    if not is_right:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise ModelSourceError(
            f"{file.name} came damaged from the hub (wrong checksum); try again", Cause.DAMAGED
        )


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise ModelSourceError when the file system of `folder` cannot take `num_bytes` more."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise ModelSourceError(
            f"not enough disk space under {folder}: {num_bytes / 1e6:,.0f} MB are needed, "
            f"{free / 1e6:,.0f} MB are free",
            Cause.NO_SPACE,
        )


def _digest(path: Path, hasher: Any) -> str:
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            hasher.update(chunk)
    return str(hasher.hexdigest())


def _list_files(reference: HubReference) -> list[HubFile]:
    from huggingface_hub import HfApi

    info = _ask(
        reference,
        lambda: HfApi().model_info(
            reference.repo, revision=reference.revision, files_metadata=True
        ),
    )
    return [
        HubFile(
            name=entry.rfilename,
            size=entry.size or 0,
            sha256=entry.lfs.sha256 if entry.lfs else None,
            blob_id=entry.blob_id,
        )
        for entry in info.siblings or []
    ]


def _read_index(reference: HubReference, commit: str) -> str:
    from huggingface_hub import hf_hub_download

    path = _ask(reference, lambda: hf_hub_download(reference.repo, INDEX_FILE, revision=commit))
    return Path(path).read_text(encoding="utf-8")


# By the name that was asked for, not by its commit: then the hub's cache knows the name offline.
def _download(
    reference: HubReference,
    files: list[HubFile],
    on_fraction: Callable[[float], None],
    folder: Path | None = None,
) -> Path:
    """Into the hub's cache, or into a folder of the caller's."""
    from huggingface_hub import snapshot_download

    path = _ask(
        reference,
        lambda: snapshot_download(
            reference.repo,
            revision=reference.revision,
            allow_patterns=[file.name for file in files],
            local_dir=folder,
            tqdm_class=_fraction_bar(on_fraction),
        ),
    )
    return Path(path)


def _fraction_bar(on_fraction: Callable[[float], None]) -> Any:
    """A silent tqdm class that reports the share of the bytes that have come."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class FractionBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            kwargs["disable"] = False
            super().__init__(*args, **{**kwargs, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self._counts_bytes and self.total:
                on_fraction(min(1.0, self.n / self.total))
            return shown

    return FractionBar


class _Nowhere:
    """A text stream that keeps nothing."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _ask(reference: HubReference, request: Callable[[], Any]) -> Any:
    """Run a request to the hub; every way it fails becomes a sentence (ModelSourceError)."""
    from huggingface_hub import errors

    try:
        return request()
    except errors.GatedRepoError as error:
        raise ModelSourceError(
            f"{reference.repo} is gated: accept its terms on the hub, then set HF_TOKEN",
            Cause.NOT_ALLOWED,
        ) from error
    except errors.RepositoryNotFoundError as error:
        # A hub does not tell strangers what it hides from them.
        is_refused = _status(error) in (401, 403)
        raise ModelSourceError(
            f"the hub has no {reference.repo}, or HF_TOKEN may not read it",
            Cause.NOT_ALLOWED if is_refused else Cause.NOT_FOUND,
        ) from error
    except (errors.RevisionNotFoundError, errors.RevisionResolutionError) as error:
        raise ModelSourceError(
            f"{reference.repo} has no revision {reference.revision!r}", Cause.NOT_FOUND
        ) from error
    except errors.HfHubHTTPError as error:
        raise _refused(reference, _status(error)) from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(reference) from error
    except errors.HTTPError as error:
        raise _unreachable(reference) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelSourceError(
                f"the disk is full: {reference} does not fit", Cause.NO_SPACE
            ) from error
        raise ModelSourceError(
            f"the download of {reference} broke off: {error}", Cause.UNREACHABLE
        ) from error


def _status(error: Any) -> int | None:
    """Of the answer that an error of the hub's library carries."""
    return None if error.response is None else int(error.response.status_code)


def _refused(reference: HubReference, status: int | None) -> ModelSourceError:
    cause, advice = Cause.OTHER, ""
    if status in (401, 403):
        cause, advice = Cause.NOT_ALLOWED, "; HF_TOKEN is missing or wrong"
    elif status == 404:
        cause = Cause.NOT_FOUND
    elif status == 429:
        cause, advice = Cause.RATE_LIMITED, " (too many requests); try again later"
    elif status is None or status >= 500:
        cause = Cause.UNREACHABLE
    return ModelSourceError(
        f"the hub answered with status {status or 'no'} for {reference.repo}{advice}", cause
    )


def _unreachable(reference: HubReference) -> ModelSourceError:
    return ModelSourceError(
        f"cannot reach the hub for {reference}; HF_HUB_OFFLINE=1 uses what is already here",
        Cause.UNREACHABLE,
    )
