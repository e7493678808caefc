"""A cluster that stands until it is taken down, beyond the command that started it.

A process of its own owns it: `hold`, which `start` leaves behind. What others need to know about it
lies in one file, and only counts while the owner holds its lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvoy_cluster.cluster import Cluster
from kvoy_cluster.folders import cluster_home
from kvoy_cluster.namespaces import run
from kvoy_cluster.waiting import wait_for

_STOP_TIMEOUT_S = 60.0
_NOT_UP = "no cluster is up: `make cluster` starts one"
_UP_ALREADY = "a cluster is up already: `make cluster-down` stops it"


class StandingError(Exception):
    """There is no cluster, or there is one already; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known about the cluster that stands."""

    owner: int
    """The process that ends it when it gets SIGTERM."""
    kubeconfig: str
    kubectl: str
    inside: dict[str, list[str]]
    """By node: what to put before a command to run it there."""


def find() -> Standing:
    """Raises StandingError if no cluster stands."""
    try:
        with _state_file().open() as file:
            if _try_lock(file.fileno()):
                raise StandingError(_NOT_UP)
            text = file.read()
    except FileNotFoundError as error:
        raise StandingError(_NOT_UP) from error
    if not text:
        raise StandingError("the cluster is still starting")
    return Standing(**json.loads(text))


def start(num_nodes: int) -> Standing:
    """Starts one and returns when it is ready; its owner lives on.

    Raises StandingError when there is one already, or when it does not start.
    """
    if not _is_unlocked():
        raise StandingError(_UP_ALREADY)
    own_package = str(Path(__file__).parents[1])
    argv = [sys.executable, "-m", "kvoy_cluster", "hold", f"--nodes={num_nodes}"]
    with _log_file().open("wb") as log:
        owner = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": own_package},
            start_new_session=True,
        )

    def has_ended() -> str | None:
        if owner.poll() is None:
            return None
        return _log_file().read_text().strip()

    def is_ready() -> Standing | None:
        standing = find()
        return standing if standing.owner == owner.pid else None

    try:
        return wait_for(is_ready, "the cluster's start", timeout_s=300, unless=has_ended)
    except RuntimeError as error:
        raise StandingError(str(error)) from error


def hold(num_nodes: int) -> None:
    """Owns a cluster until SIGTERM or SIGINT. Raises StandingError when there is one already."""
    names = [f"n{number}" for number in range(1, num_nodes + 1)]
    # Blocked, so that one which comes during the start is not lost.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with _state_file().open("a+") as file:
        if not _try_lock(file.fileno()):
            raise StandingError(_UP_ALREADY)
        file.truncate(0)
        cluster = Cluster(names)
        try:
            file.write(json.dumps(asdict(_describe(cluster))))
            file.flush()
            signal.sigwait(ends)
        finally:
            file.truncate(0)
            cluster.stop()


def stop() -> None:
    """Returns when nothing of it is left. Raises StandingError if no cluster stands."""
    standing = find()
    os.kill(standing.owner, signal.SIGTERM)

    def is_down() -> bool:
        try:
            find()
        except StandingError:
            return _is_unlocked()
        return False

    wait_for(is_down, "the cluster's end", _STOP_TIMEOUT_S)


def load(archives: Sequence[Path]) -> None:
    """Adds the images of OCI or Docker archives to all nodes.

    Raises StandingError when no cluster stands, and CommandError for a bad archive.
    """
    cluster = find()
    for inside in cluster.inside.values():
        for archive in archives:
            command = ["ctr", "--namespace=k8s.io", "images", "import", str(archive.absolute())]
            run([*inside, *command])


def _describe(cluster: Cluster) -> Standing:
    return Standing(
        owner=os.getpid(),
        kubeconfig=str(cluster.kubeconfig),
        kubectl=str(cluster.binaries.program("kubectl")),
        inside={name: node.namespaces.inside for name, node in cluster.nodes.items()},
    )


def _is_unlocked() -> bool:
    with _state_file().open("a") as file:
        return _try_lock(file.fileno())


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _state_file() -> Path:
    return cluster_home() / "up.json"


def _log_file() -> Path:
    return cluster_home() / "up.log"
