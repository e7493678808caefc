"""Settings of all tests: property tests never fail because a machine is slow."""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Fixtures that start real Kubernetes clusters, of as many parts as a test needs; where time went.
pytest_plugins = ["kvoy_cluster.fixtures", "kvoy_times"]

# Tests side by side share the cores: threads that spin while they wait would only hold up others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("kvoy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvoy")


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_loaded_once() -> Iterator[None]:
    """Each HTTP client loads them all, a tenth of a second for nothing: tests stay on loopback."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield
