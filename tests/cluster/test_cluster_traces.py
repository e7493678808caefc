"""A cluster leaves nothing on the machine, whether it is stopped or its owner is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.cluster import Cluster, is_root
from kvoy_cluster.images import PROBE_IMAGE
from kvoy_cluster.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.containers,
    pytest.mark.skipif(not is_root(), reason="nodes with containers need root"),
]

# Starts a cluster with a pod on it, says where it is, and waits to be killed.
_OWNER = f"""
import json, threading
from kvoy_cluster.cluster import Cluster
from kvoy_cluster.waiting import wait_for

cluster = Cluster(["n1"])
pods = f"/api/v1/namespaces/{{cluster.create_namespace()}}/pods"
container = {{"name": "main", "image": "{PROBE_IMAGE}", "args": ["pause"]}}
body = {{"metadata": {{"name": "main"}}, "spec": {{"containers": [container]}}}}
cluster.api.request("POST", pods, body)
wait_for(lambda: cluster.api.get(f"{{pods}}/main")["status"]["phase"] == "Running", "the pod")
pids = {{name: node.namespaces.pid for name, node in cluster.nodes.items()}}
print(json.dumps([str(cluster.folder), pids]), flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True, slots=True)
class Traces:
    """What a running cluster has on this machine."""

    folder: Path
    networks: frozenset[str]
    """Its network namespaces."""

    def processes(self) -> set[int]:
        """Those in its networks or cgroups, or started with its files."""
        return {
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._owns(pid)
        }

    def _owns(self, pid: int) -> bool:
        process = Path(f"/proc/{pid}")
        try:
            # Pods are in networks of their own, but in the cluster's cgroups.
            marks = (process / "cmdline").read_text() + (process / "cgroup").read_text()
            network = os.readlink(process / "ns" / "net")
        except (FileNotFoundError, ProcessLookupError):
            return False
        except PermissionError:
            # A machine's own first process may be hidden from all others.
            assert pid == 1
            return False
        return network in self.networks or self.folder.name in marks

    def cgroups(self) -> list[Path]:
        return list(Path("/sys/fs/cgroup").glob(f"**/kvoy-{self.folder.name}-*"))

    def mounts(self) -> list[str]:
        """Seen from outside of its namespaces."""
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line for line in lines if str(self.folder) in line or "kubelet" in line]


def traces(folder: Path, pids: list[int]) -> Traces:
    return Traces(folder, frozenset(os.readlink(f"/proc/{pid}/ns/net") for pid in pids))


def links() -> set[str]:
    """The machine's own network interfaces."""
    return set(os.listdir("/sys/class/net"))


def test_a_cluster_grows_loses_a_node_stops_without_a_trace_and_disturbs_no_other(
    cluster: Cluster,
) -> None:
    links_before = links()
    second = Cluster(["n1"])
    try:
        second.add_node("n2")
        pids = [node.namespaces.pid for node in second.nodes.values()]
        second_traces = traces(second.folder, pids)
        assert len(second_traces.processes()) > 10
        assert second_traces.cgroups()
        second.kill_node("n2")
        wait_for(lambda: not is_ready(second, "n2"), "n2 to turn unready", 90)
        assert is_ready(second, "n1")
    finally:
        second.stop()

    assert second_traces.processes() == set()
    assert second_traces.cgroups() == []
    assert second_traces.mounts() == []
    assert not second_traces.folder.exists()
    assert links() == links_before
    assert cluster.api.get("/readyz") == "ok"
    assert len(cluster.processes.running()) > 10


def test_the_next_start_removes_what_a_killed_owner_left() -> None:
    with owner_of_a_cluster() as (owner, owned):
        assert len(owned.processes()) > 10
        owner.send_signal(signal.SIGKILL)

        wait_for(lambda: not owned.processes(), "the end of its processes", 30)

    assert owned.folder.exists()
    ApiServer().stop()
    assert not owned.folder.exists()
    assert owned.cgroups() == []
    assert owned.mounts() == []


def is_ready(cluster: Cluster, node: str) -> bool:
    conditions = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


@contextmanager
def owner_of_a_cluster() -> Iterator[tuple[subprocess.Popen[str], Traces]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    argv = [sys.executable, "-c", _OWNER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        try:
            # Before the answer come the lines of a build, if there is one.
            line = next(line for line in owner.stdout if line.startswith("["))
            folder, pids = json.loads(line)
            yield owner, traces(Path(folder), list(pids.values()))
        finally:
            owner.kill()
