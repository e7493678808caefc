"""An operator of a later version takes over: its other templates touch no engine that runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoy_cluster.control_plane import ControlPlane
from kvoy_cluster.fixtures import apply_kvoy_crds
from kvoy_operated import Site, newer

pytestmark = pytest.mark.slow

_SIM = {"kind": "sim"}
_EDITED = {"kind": "sim", "args": ["--max-num-seqs=64"]}
_ENGINES = "kvoy.dev/component=engine"
_NODE = {"cpu": "400", "memory": "1600Gi"}


@pytest.fixture
def site(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Site]:
    apply_kvoy_crds(control_plane)
    control_plane.add_fake_node("roomy", _NODE)
    site = Site(control_plane, tmp_path)
    yield site
    site.close()
    control_plane.remove_fake_node("roomy")


def _engines(site: Site) -> dict[str, Any]:
    """All of their workloads and pods that an upgrade must not touch, by kind and name."""
    workloads = [*site.all("Deployment", _ENGINES), *site.all("LeaderWorkerSet", _ENGINES)]
    seen = {
        f"workload {each['metadata']['name']}": (each["metadata"]["uid"], each["spec"])
        for each in workloads
    }
    pods = {
        f"pod {each['metadata']['name']}": (
            each["metadata"]["uid"],
            each["metadata"]["labels"],
            each["spec"],
        )
        for each in site.all("Pod", _ENGINES)
    }
    return seen | pods


def _settle(site: Site, name: str, **spec: Any) -> str:
    """Its revision, once it is in place."""
    site.apply(name, **spec)
    site.wait_for_condition(name, "Ready", "True", "AllReady")
    site.wait_for_condition(name, "Progressing", "False", "Settled")
    revision: str = site.get("LLMService", name)["status"]["revision"]["current"]
    return revision


def _container(workload: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = workload["spec"]["template"]["spec"]["containers"][0]
    return container


def _versions(site: Site) -> set[str | None]:
    """Which ones the labels of engines' workloads name."""
    workloads = [*site.all("Deployment", _ENGINES), *site.all("LeaderWorkerSet", _ENGINES)]
    return {each["metadata"]["labels"].get(newer.VERSION_LABEL) for each in workloads}


def _is_router_new(site: Site, name: str) -> bool:
    router = _container(site.get("Deployment", f"{name}-router"))
    return newer.ADDED_VARIABLE in router.get("env", [])


def test_other_templates_roll_the_router_and_no_engine(site: Site) -> None:
    site.start_kubelet()
    older = site.start_operator()
    split = {"replicas": 2, "prefill": {"replicas": 1}}
    revisions = {
        "split": _settle(site, "split", engine=_SIM, **split),
        "wide": _settle(site, "wide", engine=_SIM, nodes=2, replicas=2),
    }
    before = _engines(site)
    assert len(before) == 3 + 3 + 4

    assert older.terminate() == 0
    later = site.start_operator(module=newer.__name__)

    for name in revisions:
        site.wait_until(partial(_is_router_new, site, name), f"the router of {name} rolls")
        site.wait_for_condition(name, "RouterReady", "True")
        site.wait_for_condition(name, "Progressing", "False", "Settled")
        revision = site.get("LLMService", name)["status"]["revision"]
        assert revision["current"] == revision["update"] == revisions[name]
    site.wait_until(lambda: _versions(site) == {newer.VERSION}, "workloads have the new label")
    assert _engines(site) == before

    # What is edited from now on is rendered by the later version.
    assert _settle(site, "split", engine=_EDITED, **split) != revisions["split"]
    site.wait_until(lambda: len(site.all("Deployment", _ENGINES)) == 2, "the old revision is gone")
    for workload in site.all("Deployment", _ENGINES):
        assert newer.ADDED_VARIABLE in _container(workload)["env"]
        assert workload["spec"]["template"]["metadata"]["labels"][newer.VERSION_LABEL]
    after = _engines(site)
    wide = [name for name in before if " wide-" in name]
    assert len(wide) == 1 + 4
    assert {name: after[name] for name in wide} == {name: before[name] for name in wide}
    assert not later.lines("reconcile fails")
