"""The first layer: etcd, kube-apiserver and kube-controller-manager on this machine's loopback.

Needs no root. Objects are real, with defaulting, validation, admission, garbage collection and the
workload controllers; nothing schedules pods and nothing runs them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from kvoy_cluster import build, components
from kvoy_cluster.api import Api
from kvoy_cluster.components import Place
from kvoy_cluster.go_modules import ETCD, KUBE, GoModule
from kvoy_cluster.pki import ADMINS, ClusterKeys
from kvoy_cluster.processes import Processes
from kvoy_cluster.run import Run
from kvoy_cluster.waiting import wait_for
from kvoy_contract.testing_ports import free_port

_DISCOVERY = "application/json;v=v2;g=apidiscovery.k8s.io;as=APIGroupDiscoveryList"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_START_TIMEOUT_S = 120.0
_KUBECTL_TIMEOUT_S = 600.0


class KubectlError(Exception):
    """kubectl failed; the message has its error output."""


class ApiServer:
    """Runs from its making until `stop`."""

    modules: Sequence[GoModule] = (ETCD, KUBE)
    """What must be built."""
    vital: Sequence[str] = ("etcd", "kube-apiserver", "kube-controller-manager")
    """Processes without which waiting is in vain."""
    node_grace_s = 20
    """How long a node may be silent before it counts as unready."""

    def __init__(self) -> None:
        self.binaries = build.build(self.modules)
        self._run = Run()
        self.processes = Processes(self._run.folder / "logs")
        """By name: `etcd`, `kube-apiserver`, `kube-controller-manager`, ...; to stop, restart."""
        self._namespace_numbers = itertools.count(1)
        try:
            self.place = self._choose_place()
            self.keys = ClusterKeys(self.folder / "keys", self.place.server, self.place.hosts)
            self.kubeconfig = self._write_admin()
            """An administrator's."""
            self.api = Api(self.kubeconfig)
            self._start()
        except BaseException:
            self.stop()
            raise

    @property
    def folder(self) -> Path:
        """Everything of this cluster lies here, and goes with it."""
        return self._run.folder

    def stop(self) -> None:
        """Ends all processes and removes every trace; KVOY_CLUSTER_LOGS says where to keep logs."""
        self.processes.close()
        if kept := os.environ.get("KVOY_CLUSTER_LOGS"):
            shutil.copytree(self.folder / "logs", Path(kept) / self.folder.name)
        self._run.close()

    def kubectl(self, *arguments: str, input: str | None = None, check: bool = True) -> str:
        """What kubectl prints. Raises KubectlError if it fails and `check` is set."""
        answer = subprocess.run(
            [self.binaries.program("kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments],
            input=input,
            capture_output=True,
            text=True,
            timeout=_KUBECTL_TIMEOUT_S,
            env={**os.environ, "KUBECACHEDIR": str(self._kubectl_cache)},
        )
        if check and answer.returncode != 0:
            command = f"kubectl {' '.join(arguments)}"
            raise KubectlError(f"{command}: {answer.stderr.strip()}")
        return answer.stdout

    def create_namespace(self, labels: dict[str, str] | None = None) -> str:
        """A namespace of its own for a test, where pods may be created at once."""
        name = f"test-{next(self._namespace_numbers)}"
        metadata = {"name": name, "labels": labels or {}}
        self.api.request("POST", "/api/v1/namespaces", {"kind": "Namespace", "metadata": metadata})
        self._wait_for_service_account(name)
        return name

    def apply_crds(self, files: Iterable[Path]) -> None:
        """Installs the CustomResourceDefinitions in `files`.

        Then starts the controllers again: the garbage collector looks for new kinds only every 30
        seconds, and would leave the children of a deleted object that long.
        """
        self.install_crds([crd for file in files for crd in yaml.safe_load_all(file.read_text())])
        self.processes.restart("kube-controller-manager")
        # A new namespace gets its ServiceAccount: the controllers are back.
        self.create_namespace()

    def install_crds(self, definitions: Sequence[Mapping[str, Any]]) -> None:
        """Applies CustomResourceDefinitions, and returns when their resources are served and
        kubectl knows their names."""
        for crd in definitions:
            self.api.apply(f"{_CRDS}/{crd['metadata']['name']}", crd)
        for crd in definitions:
            for path in _served_paths(crd):
                self._wait(partial(self.api.exists, path), f"{path} served")
            self._wait(partial(self._is_discovered, crd), f"names of {crd['metadata']['name']}")
        # What it holds of resources is of before, and it does not look again for a short name.
        shutil.rmtree(self._kubectl_cache, ignore_errors=True)

    @property
    def _kubectl_cache(self) -> Path:
        return self.folder / "kubectl-cache"

    def _is_discovered(self, crd: Mapping[str, Any]) -> bool:
        """Names come to the discovery document some time after the resources are served."""
        groups = self.api.request("GET", "/apis", accept=_DISCOVERY)["items"]
        names = {
            (group["metadata"]["name"], resource["resource"], name)
            for group in groups
            for version in group["versions"]
            for resource in version["resources"]
            for name in resource.get("shortNames", [""])
        }
        group, plural = crd["spec"]["group"], crd["spec"]["names"]["plural"]
        short_names = crd["spec"]["names"].get("shortNames", [""])
        return {(group, plural, name) for name in short_names} <= names

    def _choose_place(self) -> Place:
        port = free_port(offsets=(0, 1, 2))
        return Place(api_port=port, etcd_port=port + 1, etcd_peer_port=port + 2)

    def _write_admin(self) -> Path:
        """The administrator's kubeconfig."""
        return self.keys.write_kubeconfig("admin", "admin", ADMINS)

    def _start(self) -> None:
        self._start_api()
        self._start_controllers()
        self._wait_for_controllers()

    def _start_api(self) -> None:
        etcd = components.etcd(self._program("etcd"), self.place, self.folder / "etcd")
        self._start_part("etcd", etcd)
        folder = self.keys.folder
        server = components.api_server(self._program("kube-apiserver"), self.place, folder)
        self._start_part("kube-apiserver", server)
        self._wait(lambda: self.api.get("/readyz") == "ok", "API server ready")

    def _start_controllers(self) -> None:
        self.keys.write_kubeconfig("controller-manager", "system:kube-controller-manager", ADMINS)
        argv = components.controller_manager(
            self._program("kube-controller-manager"), self.keys.folder, self.node_grace_s
        )
        self._start_part("kube-controller-manager", argv)

    def _start_part(self, name: str, argv: Sequence[str | Path]) -> None:
        """Starts a part of the control plane where this layer has it."""
        self.processes.start(name, argv)

    def _wait_for_controllers(self) -> None:
        self._wait_for_service_account("default")

    def _wait_for_service_account(self, namespace: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        self._wait(lambda: self.api.exists(path), f"ServiceAccount of {namespace}")

    def _wait(self, check: Callable[[], object], what: str) -> None:
        wait_for(check, what, _START_TIMEOUT_S, unless=self._what_ended)

    def _what_ended(self) -> str | None:
        return self.processes.ended(*self.vital)

    def _program(self, name: str) -> Path:
        return self.binaries.program(name)


def _served_paths(crd: Mapping[str, Any]) -> list[str]:
    spec = crd["spec"]
    versions = [version["name"] for version in spec["versions"] if version["served"]]
    plural = spec["names"]["plural"]
    return [f"/apis/{spec['group']}/{version}/{plural}" for version in versions]
