"""A Python environment of each peer's own, in the cache folder: nothing of a peer is in Kvoy's.

A requirements file names every package with its version, so it is installed without resolving
anything. An environment that was not made to its end has no mark, and is made anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

_REQUIREMENTS = Path(__file__).parent.parent / "requirements"
_DONE = "complete"
_INSTALL_S = 600.0
_PYTHON = "3.11"
_ERROR_LINES = 3


class NotInstalled(Exception):
    """Why a peer is not there, for people."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """The lines of a peer's file: every package of its environment, pinned."""

    file: Path
    versions: dict[str, str]

    @classmethod
    def of(cls, peer: str) -> Requirements:
        file = _REQUIREMENTS / f"{peer}.txt"
        return cls(file, parse_pins(file.read_text(encoding="utf-8")))

    @property
    def digest(self) -> str:
        text = "\n".join(f"{name}=={version}" for name, version in sorted(self.versions.items()))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def parse_pins(text: str) -> dict[str, str]:
    """Versions by package. Raises ValueError for a line that is no pin."""
    pins: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, mark, version = line.strip().partition("==")
        if not mark or not name or not version:
            raise ValueError(f"{line!r} is not of the form NAME==VERSION")
        pins[name.lower()] = version
    return pins


def default_folder() -> Path:
    home = os.environ.get("KVOY_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "kvoy") / "peers"


async def install(peer: str, folder: Path) -> Path:
    """The folder of programs of the peer's environment, made first where it is not there.

    Raises NotInstalled.
    """
    requirements = Requirements.of(peer)
    venv = folder / f"{peer}-{requirements.digest}"
    if (venv / _DONE).exists():
        return venv / "bin"
    uv = shutil.which("uv")
    if uv is None:
        raise NotInstalled("uv is not on the PATH")
    shutil.rmtree(venv, ignore_errors=True)
    venv.parent.mkdir(parents=True, exist_ok=True)
    await _run(uv, "venv", "--quiet", "--python", _PYTHON, str(venv))
    python = str(venv / "bin" / "python")
    await _run(
        *(uv, "pip", "install", "--quiet", "--python", python),
        *("--no-deps", "--requirement", str(requirements.file)),
    )
    (venv / _DONE).touch()
    return venv / "bin"


async def _run(*command: str) -> None:
    """Raises NotInstalled with the command's last words."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_INSTALL_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise NotInstalled(f"not installed within {_INSTALL_S:.0f} s") from None
    if process.returncode:
        words = output.decode(errors="replace").strip().splitlines()[-_ERROR_LINES:]
        raise NotInstalled(" / ".join(words) or f"uv ended with status {process.returncode}")
