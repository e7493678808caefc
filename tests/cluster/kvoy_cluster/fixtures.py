"""pytest plugin: one cluster of each layer per test session, started when the first test asks.

Tests keep apart by namespaces of their own (`create_namespace`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.cluster import Cluster, is_root
from kvoy_cluster.control_plane import ControlPlane
from kvoy_cluster.folders import REPOSITORY


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """etcd, kube-apiserver and kube-controller-manager on loopback; needs no root."""
    server = ApiServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def kvoy_crds(api_server: ApiServer) -> None:
    """Kvoy's own resources are served by `api_server`."""
    apply_kvoy_crds(api_server)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """`api_server`'s parts, a scheduler and the LeaderWorkerSet controller; needs no root."""
    plane = ControlPlane()
    yield plane
    plane.stop()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """`control_plane`'s parts, DNS, and the nodes n1 and n2 with containers; needs root."""
    if not is_root():
        pytest.skip("nodes with containers need root")
    # Where root lacks a package, its tests fail: none of them is left out by accident.
    cluster = Cluster()
    yield cluster
    cluster.stop()


def apply_kvoy_crds(server: ApiServer) -> None:
    """Applies the committed CustomResourceDefinitions to any layer."""
    files = sorted((REPOSITORY / "crds").glob("*.yaml"))
    assert files, "no CustomResourceDefinitions in crds/"
    server.apply_crds(files)
