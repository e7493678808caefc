"""The third layer: real nodes that run containers, with DNS, in private namespaces. Needs root.

Everything lives in namespaces of its own, the control plane in the first node's network. The one
way in is a forwarder on this machine's loopback, which is where the kubeconfig points.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvoy_cluster import dns, images, node_config
from kvoy_cluster.components import LOOPBACK, Argv, Place
from kvoy_cluster.control_plane import ControlPlane
from kvoy_cluster.go_modules import COREDNS, ETCD, KUBE, LWS, PROBE, GoModule
from kvoy_cluster.namespaces import Namespaces
from kvoy_cluster.node import Node
from kvoy_cluster.pki import ADMINS

_FIRST_ADDRESS = "10.99.0.1"
_NEEDED_PROGRAMS = ("containerd", "runc", "iptables", "conntrack", "ip", "unshare", "nsenter")


def is_root() -> bool:
    return os.geteuid() == 0


def why_not() -> str | None:
    """What keeps this machine from running containers; None if nothing does."""
    if not is_root():
        return "nodes with containers need root"
    needed = [*_NEEDED_PROGRAMS, str(node_config.CNI_PROGRAMS / "ptp")]
    missing = [program for program in needed if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (tools/system-packages.sh does it)"
    return None


class Cluster(ControlPlane):
    modules: Sequence[GoModule] = (ETCD, KUBE, LWS, COREDNS, PROBE)
    vital: Sequence[str] = (*ControlPlane.vital, "coredns")
    node_grace_s = 20

    def __init__(self, nodes: Sequence[str] = ("n1", "n2")) -> None:
        """Raises RuntimeError with the reason where containers cannot run."""
        if reason := why_not():
            raise RuntimeError(reason)
        self.nodes: dict[str, Node] = {}
        self._names = nodes
        self._numbers = itertools.count(1)
        super().__init__()

    def add_node(self, name: str) -> None:
        """Starts one more node, and returns when it is ready."""
        self._make_node(name)
        self._start_node(name)
        self._wait_for_node(name)

    def add_gpus(self, node: str, count: int, mounts: Mapping[str, str] | None = None) -> None:
        """Offers `count` GPUs that do not exist on a node, once; see `gpu_plugin`.

        `mounts`: what a container with such GPUs also gets, paths on the node to paths in it.
        """
        self.nodes[node].start_gpus(count, mounts or {})

        def is_offered() -> bool:
            status = self.api.get(f"/api/v1/nodes/{node}")["status"]
            return bool(status["allocatable"].get(node_config.GPU_RESOURCE) == str(count))

        self._wait(is_offered, f"{count} GPUs on {node}")

    def import_image(self, archive: Path, nodes: Sequence[str] | None = None) -> None:
        """Adds the images of an OCI or Docker archive to some nodes, by default to all."""
        for name in self.nodes if nodes is None else nodes:
            self.nodes[name].import_image(archive)

    def exec_in_pod(self, namespace: str, pod: str, argv: Sequence[str]) -> str:
        """What a command prints in a pod's first container. Raises KubectlError if it fails."""
        return self.kubectl("exec", "-n", namespace, pod, "--", *argv)

    def kill_node_process(self, node: str, program: str) -> None:
        """Kills `kubelet`, `containerd`, `kube-proxy` or `gpus`; containers go on."""
        self.processes.stop(self.nodes[node].process(program))

    def restart_node_process(self, node: str, program: str) -> None:
        self.processes.restart(self.nodes[node].process(program))

    def kill_node(self, node: str) -> None:
        """Ends all that runs on it, as a power cut would; its object stays, and turns unready.

        Not for the first node, whose network the control plane is in.
        """
        assert node != self._names[0], f"the control plane is on {node}"
        self.nodes.pop(node).close()

    def forward(self, host: str, port: int) -> int:
        """A port on this machine's loopback that leads to an address in the cluster.

        `host` is the address of a Service, a pod or a node, as the first node reaches it.
        """
        # Opened here, and served by a process that is in the first node's network.
        with socket.create_server((LOOPBACK, 0)) as listener:
            own_port: int = listener.getsockname()[1]
            python = [sys.executable, "-m", "kvoy_cluster.forwarder"]
            argv = [*python, str(listener.fileno()), host, str(port)]
            self.processes.start(
                f"forwarder-{own_port}",
                [*self._first.in_network, *argv],
                environment={"PYTHONPATH": str(Path(__file__).parents[1])},
                pass_fds=[listener.fileno()],
            )
        return own_port

    def forward_service(self, namespace: str, name: str, port: int) -> int:
        """A port on this machine's loopback that leads to a port of a Service."""
        service = self.api.get(f"/api/v1/namespaces/{namespace}/services/{name}")
        return self.forward(service["spec"]["clusterIP"], port)

    def stop(self) -> None:
        for node in reversed(self.nodes.values()):
            node.close()
        super().stop()

    @property
    def _first(self) -> Namespaces:
        return self.nodes[self._names[0]].namespaces

    def _choose_place(self) -> Place:
        """The usual ports: nothing else is in that network."""
        return Place(
            api_port=6443,
            etcd_port=2379,
            etcd_peer_port=2380,
            lws_port=9443,
            api_bind="0.0.0.0",
            api_address=_FIRST_ADDRESS,
        )

    def _write_admin(self) -> Path:
        images.write_archives(self.folder, self._program("probe"))
        for name in self._names:
            self._make_node(name)
        server = f"https://{LOOPBACK}:{self.forward(LOOPBACK, self.place.api_port)}"
        return self.keys.write_kubeconfig("admin", "admin", ADMINS, server)

    def _start(self) -> None:
        super()._start()
        self._start_dns()
        for name in self._names:
            self._start_node(name)
        for name in self._names:
            self._wait_for_node(name)

    def _start_part(self, name: str, argv: Sequence[str | Path]) -> None:
        self.processes.start(name, [*self._first.in_network, *argv])

    def _start_dns(self) -> None:
        kubeconfig = self.keys.write_kubeconfig("coredns", "coredns", ADMINS)
        file = self.folder / "Corefile"
        file.write_text(dns.configuration(_FIRST_ADDRESS, kubeconfig))
        argv: Argv = [self._program("coredns"), "-conf", file]
        self._start_part("coredns", argv)
        for path, body in dns.objects(_FIRST_ADDRESS).items():
            self.api.apply(path, body)

    def _make_node(self, name: str) -> None:
        """Namespaces, wires and containerd, which need no API server."""
        number = next(self._numbers)
        folder = self.folder / name
        namespaces = Namespaces(self.processes, name, number, folder)
        others = [node.namespaces for node in self.nodes.values()]
        node = self.nodes[name] = Node(self.processes, namespaces, folder)
        if others:
            namespaces.wire_to(self._first)
        else:
            namespaces.wire_first()
        for other in others:
            other.route_pods_of(namespaces)
            namespaces.route_pods_of(other)
        node.start_containerd()

    def _start_node(self, name: str) -> None:
        node = self.nodes[name]
        node.wait_for_containerd()
        for archive in sorted(self.folder.glob("*.tar")):
            node.import_image(archive)
        node.start_kubelet(self.binaries, self.keys)

    def _wait_for_node(self, name: str) -> None:
        def is_ready() -> bool:
            conditions = self.api.get(f"/api/v1/nodes/{name}")["status"]["conditions"]
            return any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in conditions
            ) and self._is_schedulable(name)

        self._wait(is_ready, f"node {name} ready")
