"""One node: containerd, kubelet and kube-proxy in namespaces and a cgroup of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvoy_cluster import cgroups, node_config
from kvoy_cluster.build import Binaries
from kvoy_cluster.images import PAUSE_IMAGE
from kvoy_cluster.namespaces import Namespaces
from kvoy_cluster.node_config import CONTAINERD_SOCKET
from kvoy_cluster.pki import ClusterKeys
from kvoy_cluster.processes import Processes
from kvoy_cluster.waiting import wait_for

_PROGRAMS = ("containerd", "kubelet", "kube-proxy", "gpus")
_CONTAINERD_TIMEOUT_S = 60.0


class Node:
    def __init__(self, processes: Processes, namespaces: Namespaces, folder: Path) -> None:
        """`folder` is the node's own, inside the run's folder, whose name names the cgroup."""
        self.namespaces = namespaces
        self.name = namespaces.name
        self._processes = processes
        self._folder = folder
        self._run = folder.parent.name

    def start_containerd(self) -> None:
        network = self._folder / "cni"
        network.mkdir()
        configuration = node_config.pod_network(
            self.namespaces.pod_range, self._folder / "addresses"
        )
        (network / "kvoy.conflist").write_text(json.dumps(configuration))
        file = self._folder / "containerd.toml"
        file.write_text(node_config.containerd(self._folder, PAUSE_IMAGE))
        self._start("containerd", ["containerd", "--config", file])

    def wait_for_containerd(self) -> None:
        wait_for(
            lambda: self._ctr("version"),
            f"containerd of {self.name}",
            _CONTAINERD_TIMEOUT_S,
            unless=lambda: self._processes.ended(self._process("containerd")),
        )

    def import_image(self, archive: Path) -> None:
        """Adds the images of an OCI or Docker archive, under the names they have in it."""
        self._ctr("--namespace=k8s.io", "images", "import", str(archive))

    def images(self) -> list[str]:
        return self._ctr("--namespace=k8s.io", "images", "list", "--quiet").split()

    def start_kubelet(self, binaries: Binaries, keys: ClusterKeys) -> None:
        """Also starts kube-proxy. The node shows as ready a few seconds later."""
        cgroups.create(self._run, self.name)
        # No name outside of the cluster can be asked for: its DNS answers everything.
        resolver = self._folder / "resolv.conf"
        resolver.touch()
        cgroup = cgroups.name(self._run, self.name)
        configuration = self._write(
            "kubelet", node_config.kubelet(cgroup, keys.folder / "ca.crt", resolver)
        )
        kubeconfig = keys.write_kubeconfig(
            f"kubelet-{self.name}", f"system:node:{self.name}", "system:nodes"
        )
        address = self.namespaces.address
        self._start(
            "kubelet",
            [
                binaries.program("kubelet"),
                f"--config={configuration}",
                f"--kubeconfig={kubeconfig}",
                f"--hostname-override={self.name}",
                f"--node-ip={address}",
            ],
        )
        proxy = keys.write_kubeconfig(f"kube-proxy-{self.name}", "system:kube-proxy")
        configuration = self._write("kube-proxy", node_config.kube_proxy(self.name, address, proxy))
        self._start("kube-proxy", [binaries.program("kube-proxy"), f"--config={configuration}"])

    def start_gpus(self, count: int, mounts: Mapping[str, str]) -> None:
        """A device plugin for GPUs that do not exist; see `gpu_plugin`."""
        package = Path(__file__).parents[1]
        argv = [sys.executable, "-m", "kvoy_cluster.gpu_plugin", str(count)]
        argv += [f"{host}:{container}" for host, container in mounts.items()]
        self._start("gpus", argv, environment={"PYTHONPATH": str(package)})

    def process(self, program: str) -> str:
        """The name among the cluster's processes. Raises LookupError for an unknown program."""
        if program not in _PROGRAMS:
            raise LookupError(f"a node has no {program}, but {', '.join(_PROGRAMS)}")
        return self._process(program)

    def close(self) -> None:
        """Ends everything on it, as a power cut would."""
        self.namespaces.close()
        for program in _PROGRAMS:
            self._processes.stop(self._process(program))

    def _process(self, program: str) -> str:
        return f"{program}-{self.name}"

    def _start(
        self,
        program: str,
        argv: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        inside = [*self.namespaces.inside, *argv]
        self._processes.start(self._process(program), inside, environment=environment)

    def _write(self, program: str, configuration: object) -> Path:
        file = self._folder / f"{program}.json"
        file.write_text(json.dumps(configuration))
        return file

    def _ctr(self, *arguments: str) -> str:
        return self.namespaces.run("ctr", f"--address={CONTAINERD_SOCKET}", *arguments)
