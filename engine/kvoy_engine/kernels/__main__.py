"""`python -m kvoy_engine.kernels`: compile the CPU kernels ahead, for images without a compiler."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoy_contract.settings import read_settings, setting
from kvoy_engine.kernels.build import KernelsUnavailable
from kvoy_engine.kernels.prebuilt import DEFAULT_FOLDER, build_all

PROG = "python -m kvoy_engine.kernels"
DESCRIPTION = (
    "Compile the CPU kernels for every instruction set of this kind of machine (needs g++ and the "
    "installed torch). A start takes the best that its own machine has, and needs no compiler."
)


@dataclass(frozen=True, slots=True)
class KernelsConfig:
    to: str | None = setting(
        None, metavar="DIR", help="where to put them (default: into the installed package)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    config = read_settings(KernelsConfig, PROG, DESCRIPTION, argv)
    folder = Path(config.to) if config.to else DEFAULT_FOLDER
    try:
        paths = build_all(folder, platform.machine(), lambda text: print(text, flush=True))
    except (KernelsUnavailable, OSError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    if not paths:
        print(f"{PROG}: there are no kernels for {platform.machine()}", file=sys.stderr)
        return 1
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
