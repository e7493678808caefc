"""Where models live on this machine: one folder per model, prepared once, whole or absent.

A reference is a name of the built-in list or of an added model, a local folder, a `.gguf` file, or
`hf://org/name@revision`. `resolve` turns it into a folder with `config.json`, the tokenizer and
safetensors weights. Prepared folders are `$KVOY_HOME/models/<name>/` (`~/.cache/kvoy` by default);
each holds a manifest that says where the model came from and what it is.

Imports neither torch nor transformers. Called by `kvoy up`, `kvoy model` and `kvoy serve`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvoy_engine import hub, model_fetch
from kvoy_engine.builtin_models import BUILTIN_MODELS, BuiltinModel, fetch_gguf
from kvoy_engine.home import home
from kvoy_engine.model_errors import Cause, ModelSourceError
from kvoy_engine.model_folder import (
    MANIFEST,
    is_prepared,
    manifest_of,
    prepare,
    read_manifest,
)

CONVERTER_VERSION = 1
"""Part of a converted model's identity: raise it when a GGUF would give other values or ids."""
_NAME = re.compile(r"[A-Za-z0-9][\w.@-]*")
_READ_BYTES = 1 << 20

Say = Callable[[str], None]
"""Hears, in a few words, what is being done now."""
Fraction = Callable[[float], None]
"""Hears how far that is, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One line of `kvoy model list`."""

    name: str
    folder: Path | None
    """None: built in, not fetched yet."""
    source: str
    num_bytes: int
    description: str = ""


def models_folder() -> Path:
    return home() / "models"


def default_name(reference: str) -> str:
    """The name under which a reference's model is served unless told otherwise."""
    if reference in BUILTIN_MODELS:
        return reference
    if reference.startswith(hub.SCHEME):
        return hub.parse_reference(reference).repo
    path = Path(reference)
    return path.stem if path.suffix == ".gguf" else path.absolute().name


def entry_name(reference: str) -> str | None:
    """The name that `kvoy model add REFERENCE` gives; None for what is a name already."""
    if reference in BUILTIN_MODELS:
        return None
    if _NAME.fullmatch(reference) and is_prepared(models_folder() / reference):
        return None
    return default_name(reference).rpartition("/")[2]


def resolve(
    reference: str,
    progress: Say,
    on_fraction: Fraction | None = None,
    download_dir: Path | None = None,
) -> Path:
    """The model folder of a reference, fetched or converted first where it has to be.

    Models of a hub lie in `download_dir` if it is given. Raises ModelSourceError when the model
    cannot be had.
    """
    report = on_fraction or _ignore_fraction
    try:
        if download_dir is not None and reference.startswith(hub.SCHEME):
            wanted = hub.parse_reference(reference)
            target = model_fetch.folder_for(wanted, download_dir)
            return model_fetch.fetch(wanted, target, progress, report)
        return _resolve(reference, progress, report)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelSourceError(
                f"no disk space is left for {reference}", Cause.NO_SPACE
            ) from error
        raise ModelSourceError(f"cannot prepare {reference}: {error}") from error


def _resolve(reference: str, progress: Say, on_fraction: Fraction) -> Path:
    if reference.startswith(hub.SCHEME):
        return _from_hub(hub.parse_reference(reference), None, progress, on_fraction)
    if reference in BUILTIN_MODELS:
        return _from_builtin(BUILTIN_MODELS[reference], progress, on_fraction)
    if _NAME.fullmatch(reference) and read_manifest(models_folder() / reference):
        if is_prepared(models_folder() / reference):
            return models_folder() / reference
        raise ModelSourceError(
            f"files of the model {reference!r} are gone or changed; add it again"
        )
    path = Path(reference).expanduser()
    if path.is_dir():
        return _checked_folder(path)
    if path.is_file():
        return _from_gguf(path, None, "auto", progress, on_fraction)
    names = ", ".join(sorted({model.name for model in stored_models()}))
    raise ModelSourceError(
        f"no model {reference!r}: it is neither a folder, nor a GGUF file, nor one of {names}; "
        f"models of a hub are written hf://org/name@revision"
    )


def add(
    name: str,
    reference: str,
    progress: Say,
    on_fraction: Fraction | None = None,
    dtype: str = "auto",
) -> Path:
    """Prepare a reference under a name of the user's own. Raises ModelSourceError.

    A local folder is linked, not copied. `dtype` is the stored type of a converted GGUF.
    """
    report = on_fraction or _ignore_fraction
    if not _NAME.fullmatch(name) or name in BUILTIN_MODELS:
        raise ModelSourceError(f"{name!r} cannot be the name of an added model")
    if reference.startswith(hub.SCHEME):
        return _from_hub(hub.parse_reference(reference), name, progress, report)
    path = Path(reference).expanduser()
    if path.is_file():
        return _from_gguf(path, name, dtype, progress, report)
    folder = resolve(reference, progress, on_fraction)
    manifest = read_manifest(folder)
    identity = manifest.identity if manifest else f"folder:{folder}"
    entries = (entry for entry in folder.iterdir() if entry.is_file() and entry.name != MANIFEST)
    files = {entry.name: entry.resolve() for entry in entries}
    return _link_folder(name, reference, identity, files, progress)


def stored_models() -> list[StoredModel]:
    """The built-in models and those prepared on this machine, by name."""
    models = {
        model.name: StoredModel(model.name, None, model.source, 0, model.description)
        for model in BUILTIN_MODELS.values()
    }
    root = models_folder()
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        manifest = read_manifest(folder)
        if manifest is not None and not folder.name.startswith("."):
            known = models.get(folder.name)
            models[folder.name] = StoredModel(
                name=folder.name,
                folder=folder,
                source=manifest.source,
                num_bytes=sum(manifest.files.values()),
                description=known.description if known else "",
            )
    return [models[name] for name in sorted(models)]


def _checked_folder(path: Path) -> Path:
    """A folder that the user keeps: it must look like a model."""
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ModelSourceError(f"the folder {path} has no {name}")
    if not any(path.glob("*.safetensors")):
        raise ModelSourceError(f"the folder {path} has no weights in safetensors format")
    return path.resolve()


def _from_builtin(model: BuiltinModel, progress: Say, on_fraction: Fraction) -> Path:
    target = models_folder() / model.name
    identity = f"{_gguf_identity(model.sha256, 'float32')}:{dict(model.sampling)}"

    def build(folder: Path) -> None:
        hub.check_space(folder, model.needed_bytes)
        gguf = fetch_gguf(model, folder / "download", progress)
        _convert(gguf, folder, "float32", progress, on_fraction)
        _add_to_json(folder / "generation_config.json", dict(model.sampling))
        shutil.rmtree(folder / "download")

    return prepare(target, model.source, identity, build, progress)


def _from_gguf(
    path: Path, name: str | None, dtype: str, progress: Say, on_fraction: Fraction
) -> Path:
    from kvoy_engine.gguf_convert import STORED_DTYPES, choose_dtype, open_gguf

    path = path.resolve()
    status = path.stat()
    # The path, size and time of a file stand for its content: a later start reads none of it.
    stamp = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{dtype}".encode()
    target = models_folder() / (name or f"{path.stem}-{hashlib.sha256(stamp).hexdigest()[:12]}")
    source = f"{path} ({status.st_size} bytes, changed {status.st_mtime_ns})"
    if is_prepared(target) and manifest_of(target).source == source:
        return target
    progress(f"reading {path.name}")
    stored = choose_dtype(open_gguf(path)) if dtype == "auto" else dtype
    if stored not in STORED_DTYPES:
        raise ModelSourceError(f"dtype is one of auto, {', '.join(STORED_DTYPES)}; not {dtype!r}")
    identity = _gguf_identity(sha256_of(path), stored)

    def build(folder: Path) -> None:
        _convert(path, folder, stored, progress, on_fraction)

    return prepare(target, source, identity, build, progress)


def _gguf_identity(sha256: str, dtype: str) -> str:
    return f"gguf:{sha256}:{dtype}:{CONVERTER_VERSION}"


def _convert(path: Path, folder: Path, dtype: str, progress: Say, on_fraction: Fraction) -> None:
    from kvoy_engine.gguf_convert import convert, open_gguf, plan_tensors

    progress(f"converting {path.name} to safetensors ({dtype}, once)")
    file = open_gguf(path)
    needed = sum(tensor.num_bytes for tensor in plan_tensors(file, dtype))
    hub.check_space(folder, needed)
    convert(file, folder, dtype, on_fraction)


def _add_to_json(path: Path, values: Mapping[str, float]) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _from_hub(
    reference: hub.HubReference, name: str | None, progress: Say, on_fraction: Fraction
) -> Path:
    commit = hub.resolve_commit(reference)
    pinned = str(hub.HubReference(reference.repo, commit))
    entry = name or f"{reference.repo.replace('/', '--')}@{commit[:12]}"

    # Under the lock of the entry: of processes that share the cache one downloads.
    def build(folder: Path) -> None:
        snapshot = hub.fetch(reference, commit, progress, on_fraction)
        _link_files({file: snapshot.folder / file for file in snapshot.files}, folder)

    return prepare(models_folder() / entry, str(reference), pinned, build, progress)


def _link_folder(
    name: str, source: str, identity: str, files: dict[str, Path], progress: Say
) -> Path:
    """A prepared folder of links to files that live elsewhere (hub cache, a user's folder)."""

    def build(folder: Path) -> None:
        _link_files(files, folder)

    return prepare(models_folder() / name, source, identity, build, progress)


def _link_files(files: dict[str, Path], folder: Path) -> None:
    for file, place in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).symlink_to(place.resolve())


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def _ignore_fraction(fraction: float) -> None:
    pass
