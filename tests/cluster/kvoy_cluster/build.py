"""Builds the programs of a test cluster, once for each state of their Go modules.

Only the binaries are kept (about 350 MB, under `cluster_home()`); what Go downloads and compiles on
the way (7 GB) goes to a temporary folder, unless GOCACHE or GOMODCACHE name a place of their own.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvoy_cluster.folders import cluster_home
from kvoy_cluster.go_modules import ALL_MODULES, GoModule

Report = Callable[[str], None]
"""Takes one line of progress."""

_PROGRESS_INTERVAL_S = 10.0


class BuildError(Exception):
    """The programs cannot be built; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """Programs that exist."""

    folders: Mapping[str, Path]
    """By the module's name."""

    def program(self, name: str) -> Path:
        for folder in self.folders.values():
            if (folder / name).exists():
                return folder / name
        raise LookupError(f"no program {name} among {sorted(self.folders)}")


def build(
    modules: Sequence[GoModule] = ALL_MODULES,
    report: Report = lambda line: print(line, flush=True),
) -> Binaries:
    """The binaries of `modules`, built first where they are missing.

    Raises BuildError when Go is missing, too old, or fails.
    """
    root = cluster_home() / "bin"
    root.mkdir(exist_ok=True)
    folders = {module.name: root / folder_name(module) for module in modules}
    if all(folder.is_dir() for folder in folders.values()):
        return Binaries(folders)
    with _one_build_at_a_time(root, report), _go_environment(root) as environment:
        for module in modules:
            if not folders[module.name].is_dir():
                _build_one(module, folders[module.name], environment, report)
    return Binaries(folders)


def folder_name(module: GoModule) -> str:
    toolchain = _toolchain(module.folder, module.go_version)
    return f"{module.name}-{module.version}-{module.key(toolchain)}"


@functools.cache
def _toolchain(folder: Path, needed: str) -> str:
    """The Go that builds there: Go may fetch a newer one than is installed."""
    advice = f"the test cluster is built by Go {needed} or newer: https://go.dev/doc/install"
    try:
        answer = subprocess.run(
            ["go", "env", "GOVERSION", "GOOS", "GOARCH"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError as error:
        raise BuildError(f"there is no `go` on PATH; {advice}") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{error.stderr.strip()}; {advice}") from error
    version, system, machine = answer.stdout.split()
    if _numbers(version.removeprefix("go")) < _numbers(needed):
        raise BuildError(f"this is {version}; {advice}")
    return f"{version} {system}/{machine}"


def _numbers(version: str) -> tuple[int, ...]:
    """`1.26.8` and `1.27rc1` as numbers that compare; a suffix counts for nothing."""
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return tuple(numbers)


@contextmanager
def _one_build_at_a_time(root: Path, report: Report) -> Iterator[None]:
    with (root / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process builds the test cluster's programs: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _go_environment(root: Path) -> Iterator[dict[str, str]]:
    """Go's caches in a folder that goes away, beside the binaries: /tmp may be small."""
    for leftover in root.glob(".go-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=".go-", dir=root) as scratch:
        defaults = {"GOCACHE": f"{scratch}/build", "GOMODCACHE": f"{scratch}/modules"}
        yield {
            **defaults,
            **os.environ,
            "CGO_ENABLED": "0",
            # Without -modcacherw the folder of downloads could not be removed.
            "GOFLAGS": "-mod=readonly -buildvcs=false -trimpath -modcacherw",
        }


def _build_one(
    module: GoModule, folder: Path, environment: Mapping[str, str], report: Report
) -> None:
    start = time.monotonic()
    report(f"building {module.name} {module.version} from its Go module")
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
        new = Path(scratch) / module.name
        new.mkdir()
        if module.package:
            _compile(module, new / module.name, environment, report)
        for link in module.links:
            (new / link).symlink_to(module.name)
        if module.keeps:
            downloaded = _go(module, environment, "mod", "download", "-json", module.requires)
            source = Path(json.loads(downloaded)["Dir"])
            for path, name in module.keeps.items():
                shutil.copyfile(source / path, new / name)
        new.rename(folder)
    size_mb = sum(file.lstat().st_size for file in folder.iterdir()) / 1e6
    report(f"built {module.name}: {size_mb:.0f} MB in {time.monotonic() - start:.0f} s")


def _compile(
    module: GoModule, output: Path, environment: Mapping[str, str], report: Report
) -> None:
    """Go names each package that it compiles; what else it says explains a failure."""
    total = len(_go(module, environment, "list", "-deps", module.package).splitlines())
    flags = ["-v", "-ldflags", module.linker_flags(), "-o", str(output)]
    with subprocess.Popen(
        ["go", "build", *flags, module.package],
        cwd=module.folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        last_report = time.monotonic()
        for line in process.stderr:
            lines.append(line)
            if time.monotonic() - last_report > _PROGRESS_INTERVAL_S:
                last_report = time.monotonic()
                report(f"building {module.name}: {len(lines)} of at most {total} packages")
    if process.returncode != 0:
        raise BuildError(f"go build of {module.name} failed:\n{''.join(lines[-30:])}")


def _go(module: GoModule, environment: Mapping[str, str], *arguments: str) -> str:
    answer = subprocess.run(
        ["go", *arguments], cwd=module.folder, env=environment, capture_output=True, text=True
    )
    if answer.returncode != 0:
        raise BuildError(f"go {' '.join(arguments)} for {module.name} failed:\n{answer.stderr}")
    return answer.stdout
