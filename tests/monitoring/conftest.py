"""A real Prometheus that scrapes a router and engines; traffic moves every series."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoy_monitoring.testing import Observed, observe_stack


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Prometheus, two engines and a router that have traffic all the while."""
    if shutil.which("prometheus") is None:
        pytest.fail("no prometheus here: tools/system-packages.sh installs it")
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with observe_stack(folder) as stack:
        yield stack
