"""The platform as a fixture; see `kvoy_e2e.platform`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from kvoy_cluster.build import build
from kvoy_cluster.cluster import Cluster
from kvoy_e2e.platform import (
    BARE_NODE,
    CLIENT,
    CLIENT_POD,
    FULL_NODE,
    MODEL,
    MODELS,
    NAMESPACE,
    VOLUME,
    Platform,
    archives,
)


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> dict[str, Path]:
    """Archives of all images, by name; every node has them, but one lacks the native engine."""
    found = archives()
    for name, archive in found.items():
        cluster.import_image(archive, [FULL_NODE] if name == "engine-cpu" else None)
    return found


@pytest.fixture(scope="module")
def platform(cluster: Cluster, images: dict[str, Path]) -> Iterator[Platform]:
    """Images are loaded, the client waits in its pod; Kvoy itself is not installed yet."""
    platform = Platform(cluster, build())
    platform.kubectl("cordon", BARE_NODE)
    model = MODELS / MODEL
    assert model.is_dir(), f"no model at {model}: make model"
    platform.kubectl("create", "namespace", NAMESPACE)
    platform.apply(VOLUME.format(path=model.parent))
    platform.kubectl(
        *("create", "configmap", CLIENT, "-n", NAMESPACE),
        f"--from-file={Path(__file__).parent / 'client.py'}",
    )
    platform.apply(CLIENT_POD.replace("{version}", version("kvoy")))
    platform.kubectl(
        *("wait", "-n", NAMESPACE, "--for=condition=Ready", "--timeout=240s", f"pod/{CLIENT}")
    )
    yield platform
    platform.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    platform.kubectl("uncordon", BARE_NODE)
