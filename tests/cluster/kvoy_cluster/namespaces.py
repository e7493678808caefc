"""A node's own mount, network and process namespaces, and the wires between nodes.

All wires lie inside the nodes' namespaces: the machine's own network has no route into a cluster,
and a cluster none out of it, so that no packet for one of its addresses ever leaves this machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvoy_cluster.components import SERVICE_RANGE
from kvoy_cluster.processes import DIE_WITH_PARENT, Processes
from kvoy_cluster.waiting import wait_for

_INIT = Path(__file__).with_name("node_init.sh")
_TIMEOUT_S = 30.0
_WIRE = "lan"
"""The link of each node to the others; in the first node a bridge."""


class Namespaces:
    """Made with all its namespaces; what runs in them ends with `close`, or with the owner."""

    def __init__(self, processes: Processes, name: str, number: int, folder: Path) -> None:
        """`number` is from 1 and makes the addresses; node 1 must be there before the others."""
        self.name = name
        self.number = number
        self._processes = processes
        self._process = f"init-{name}"
        folder.mkdir()
        # Killing `unshare` kills the child, and with the first process of its namespace all others.
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child=KILL", "--"]
        parent = processes.start(self._process, [*unshare, _INIT, folder])
        wait_for(
            (folder / "ready").exists,
            f"namespaces of {name}",
            _TIMEOUT_S,
            unless=lambda: processes.ended(self._process),
        )
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        self.pid = int(children[0])
        """Of the namespaces' first process, seen from outside."""

    @property
    def address(self) -> str:
        return f"10.99.0.{self.number}"

    @property
    def pod_range(self) -> str:
        return f"10.244.{self.number}.0/24"

    @property
    def in_network(self) -> list[str]:
        """Starts a command in the network namespace alone, when put before it."""
        return ["nsenter", f"--target={self.pid}", "--net", "--"]

    @property
    def inside(self) -> list[str]:
        """Starts a command in all namespaces, when put before it; it ends when this is killed."""
        flags = [f"--target={self.pid}", "--mount", "--net", "--pid"]
        return ["nsenter", *flags, "--", *DIE_WITH_PARENT]

    def run(self, *argv: str | Path) -> str:
        """What a command prints in all namespaces. Raises CommandError when it fails."""
        return run([*self.inside, *argv])

    def close(self) -> None:
        """Kills everything inside; returns when it is gone."""
        # `unshare` ends when it has reaped the first process, which goes last.
        if self._processes.is_running(self._process):
            os.kill(self.pid, signal.SIGKILL)
            self._processes.join(self._process)

    def wire_first(self) -> None:
        """Makes the bridge that all nodes are on."""
        self._ip("link", "add", _WIRE, "type", "bridge")
        self._ip("address", "add", f"{self.address}/24", "dev", _WIRE)
        self._ip("link", "set", _WIRE, "up")
        self._route_services()

    def wire_to(self, first: Namespaces) -> None:
        """Connects this node with the bridge in the first."""
        port = f"port{self.number}"
        first._ip("link", "add", port, "type", "veth", "peer", "name", _WIRE, "netns", self._pid)
        first._ip("link", "set", port, "master", _WIRE, "up")
        self._ip("address", "add", f"{self.address}/24", "dev", _WIRE)
        self._ip("link", "set", _WIRE, "up")
        self._route_services()

    def route_pods_of(self, other: Namespaces) -> None:
        self._ip("route", "replace", other.pod_range, "via", other.address)

    def _route_services(self) -> None:
        """A connection needs a route before kube-proxy turns its address into a pod's."""
        self._ip("route", "add", SERVICE_RANGE, "dev", _WIRE)

    @property
    def _pid(self) -> str:
        return str(self.pid)

    def _ip(self, *arguments: str) -> None:
        run([*self.in_network, "ip", *arguments])


class CommandError(Exception):
    """A command failed; the message has what it said."""


def run(argv: Sequence[str | Path]) -> str:
    answer = subprocess.run(argv, capture_output=True, text=True)
    if answer.returncode != 0:
        words = " ".join(str(word) for word in argv)
        raise CommandError(f"{words}: {answer.stderr.strip() or answer.stdout.strip()}")
    return answer.stdout
