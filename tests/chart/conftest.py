"""helm alone, and helm on an API server that has never heard of Kvoy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.helm import Helm


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    return Helm(tmp_path)


@pytest.fixture(scope="module")
def bare_server() -> Iterator[ApiServer]:
    """A server of its own: the chart brings the definitions itself."""
    server = ApiServer()
    yield server
    server.stop()


@pytest.fixture
def live_helm(tmp_path: Path, bare_server: ApiServer) -> Helm:
    return Helm(tmp_path, bare_server.kubeconfig)
