"""pytest plugin: one cluster of each layer per test session, started when the first test asks.

Tests keep apart by namespaces of their own (`create_namespace`). Tests side by side (pytest-xdist)
have clusters of their own, too; those of containers are to run alone, which `--containers` is for.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.cluster import Cluster, is_root
from kvoy_cluster.control_plane import ControlPlane
from kvoy_cluster.folders import REPOSITORY


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--containers",
        choices=("with", "without", "only"),
        default="with",
        help="whether to run tests of containers: of nodes that run them, of building images",
    )


_CONTAINERS_TIMEOUT_S = 1800
"""What a test of containers may take: images of gigabytes may have to be built first."""


# Before markers are selected by -m.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests on nodes as tests of containers, and leaves out what is not wanted."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.containers)
        if _has_containers(item) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_CONTAINERS_TIMEOUT_S))
    wanted = config.getoption("--containers")
    if wanted != "with":
        left_out = [item for item in items if _has_containers(item) != (wanted == "only")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _has_containers(item) == (wanted == "only")]


def _has_containers(item: pytest.Item) -> bool:
    return item.get_closest_marker("containers") is not None


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
