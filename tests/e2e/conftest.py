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


@pytest.fixture(scope="module")
def platform(cluster: Cluster) -> Iterator[Platform]:
    """Images are loaded, the client waits in its pod; Kvoy itself is not installed yet."""
    platform = Platform(cluster, build())
    for name, archive in archives().items():
        cluster.import_image(archive, [FULL_NODE] if name == "engine-cpu" else None)
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
    platform.kubectl("wait", "-n", NAMESPACE, "--for=condition=Ready", f"pod/{CLIENT}")
    yield platform
    platform.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
