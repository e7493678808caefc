"""The second layer: the first, a scheduler, and the LeaderWorkerSet controller. Needs no root.

Nodes are objects only: pods get scheduled, and nobody runs them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from kvoy_cluster import components, lws
from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.components import LOOPBACK, Argv, Place
from kvoy_cluster.go_modules import ETCD, KUBE, LWS, GoModule
from kvoy_cluster.pki import ADMINS
from kvoy_contract.testing_ports import free_port

_WEBHOOK_CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1"
_DAY_S = 86_400


class ControlPlane(ApiServer):
    modules: Sequence[GoModule] = (ETCD, KUBE, LWS)
    vital: Sequence[str] = (*ApiServer.vital, "kube-scheduler", "lws")
    # Nobody speaks for a node without a kubelet; it stays as ready as it was declared.
    node_grace_s = _DAY_S

    def add_fake_node(
        self,
        name: str,
        capacity: Mapping[str, str],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """A ready node without a kubelet, with room for 110 pods and `capacity`.

        `capacity` is by resource, e.g. `{"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "4"}`.
        """
        all_labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})}
        metadata = {"name": name, "labels": all_labels}
        room = {"pods": "110", **capacity}
        ready = {"type": "Ready", "status": "True", "reason": "Fake", "message": "no kubelet"}
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        self.api.request("POST", "/api/v1/nodes", {"kind": "Node", "metadata": metadata})
        self.api.apply(
            f"/api/v1/nodes/{name}/status",
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status},
        )
        self._wait(lambda: self._is_schedulable(name), f"node {name} takes pods")

    def remove_fake_node(self, name: str) -> None:
        self.api.request("DELETE", f"/api/v1/nodes/{name}")

    def _is_schedulable(self, node: str) -> bool:
        """New nodes carry a taint until the controllers have seen that they are ready."""
        return not self.api.get(f"/api/v1/nodes/{node}")["spec"].get("taints")

    def _choose_place(self) -> Place:
        port = free_port(offsets=(0, 1, 2, 3))
        return Place(api_port=port, etcd_port=port + 1, etcd_peer_port=port + 2, lws_port=port + 3)

    def _start(self) -> None:
        self._start_api()
        # Before the controllers, so that the garbage collector knows groups from the start.
        self.install_crds(list(yaml.safe_load_all(self._lws_file("crd.yaml"))))
        self._start_controllers()
        self._start_scheduler()
        self._start_lws()
        self._wait_for_controllers()
        self._wait_for_lws()

    def _start_scheduler(self) -> None:
        self.keys.write_kubeconfig("scheduler", "system:kube-scheduler")
        argv = components.scheduler(self._program("kube-scheduler"), self.keys.folder)
        self._start_part("kube-scheduler", argv)

    def _start_lws(self) -> None:
        kubeconfig = self.keys.write_kubeconfig("lws", "lws-controller", ADMINS)
        certificates = self.keys.write_server("lws-webhooks/tls", [LOOPBACK])
        config = self.folder / "lws.json"
        config.write_text(json.dumps(lws.configuration(self.place.lws_port, certificates)))
        argv: Argv = [self._program("lws"), f"--kubeconfig={kubeconfig}", f"--config={config}"]
        self._start_part("lws", argv)
        configurations = lws.webhooks(
            self._lws_file("webhooks.yaml"), self.place.lws_port, self.keys.authority_pem
        )
        for configuration in configurations:
            plural = f"{configuration['kind'].lower()}s"
            name = configuration["metadata"]["name"]
            self.api.apply(f"{_WEBHOOK_CONFIGURATIONS}/{plural}/{name}", configuration)

    def _wait_for_lws(self) -> None:
        probe = lws.smallest_group("default")
        path = f"{lws.API}/namespaces/default/leaderworkersets?dryRun=All"

        def is_defaulted() -> bool:
            """Whether the webhooks work: only they set a group's network."""
            group: Mapping[str, Any] = self.api.request("POST", path, probe)
            return "networkConfig" in group["spec"]

        self._wait(is_defaulted, "webhooks of the LeaderWorkerSet controller")

    def _lws_file(self, name: str) -> str:
        return self._program(name).read_text()
