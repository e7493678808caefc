"""The command lines of the control plane's programs. Pure: ports and paths come in.

Certificates are those of `pki.ClusterKeys`. All is tuned for clusters that live for minutes: no
write waits for the disk, no leader is elected, no secure port is opened that nobody asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
DNS_DOMAIN = "cluster.local"

LOOPBACK = "127.0.0.1"

Argv = list[str | Path]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a control plane listens."""

    api_port: int
    etcd_port: int
    etcd_peer_port: int
    lws_port: int = 0
    """Of the LeaderWorkerSet controller's webhooks; 0: there are none."""
    api_bind: str = LOOPBACK
    api_address: str | None = None
    """What nodes reach the API server at; None where there are no nodes."""

    @property
    def server(self) -> str:
        return f"https://{self.api_address or LOOPBACK}:{self.api_port}"

    @property
    def hosts(self) -> list[str]:
        """Names and addresses that the API server's certificate is for."""
        service = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        service.append(f"kubernetes.default.svc.{DNS_DOMAIN}")
        return [LOOPBACK, "localhost", API_SERVICE, *service] + (
            [self.api_address] if self.api_address else []
        )


def etcd(program: Path, place: Place, data: Path) -> Argv:
    client = f"http://{LOOPBACK}:{place.etcd_port}"
    peer = f"http://{LOOPBACK}:{place.etcd_peer_port}"
    return [
        program,
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(program: Path, place: Place, keys: Path) -> Argv:
    # A loopback address cannot be an endpoint of the Service `kubernetes`: without nodes, none is.
    endpoints = "lease" if place.api_address else "none"
    # Nor can it be one of a Service in front of an aggregated API, which an ExternalName can name.
    routing = "true" if place.api_address else "false"
    return [
        program,
        f"--etcd-servers=http://{LOOPBACK}:{place.etcd_port}",
        f"--bind-address={place.api_bind}",
        f"--secure-port={place.api_port}",
        f"--advertise-address={place.api_address or LOOPBACK}",
        f"--endpoint-reconciler-type={endpoints}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--tls-cert-file={keys}/apiserver.crt",
        f"--tls-private-key-file={keys}/apiserver.key",
        f"--client-ca-file={keys}/ca.crt",
        f"--kubelet-client-certificate={keys}/apiserver-kubelet.crt",
        f"--kubelet-client-key={keys}/apiserver-kubelet.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-account-issuer=https://kubernetes.default.svc.{DNS_DOMAIN}",
        f"--service-account-key-file={keys}/sa.pub",
        f"--service-account-signing-key-file={keys}/sa.key",
        f"--requestheader-client-ca-file={keys}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={keys}/front-proxy-client.crt",
        f"--proxy-client-key-file={keys}/front-proxy-client.key",
        f"--enable-aggregator-routing={routing}",
        "--allow-privileged=true",
        "--profiling=false",
    ]


def controller_manager(program: Path, keys: Path, node_grace_s: int) -> Argv:
    """`node_grace_s`: how long a node may be silent before it counts as unready."""
    return [
        program,
        f"--kubeconfig={keys}/controller-manager.kubeconfig",
        f"--service-account-private-key-file={keys}/sa.key",
        f"--root-ca-file={keys}/ca.crt",
        f"--cluster-signing-cert-file={keys}/ca.crt",
        f"--cluster-signing-key-file={keys}/ca.key",
        # One user for all controllers: making an account for each takes longer than all else.
        "--use-service-account-credentials=false",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        "--leader-elect=false",
        "--secure-port=0",
        f"--node-monitor-grace-period={node_grace_s}s",
        "--horizontal-pod-autoscaler-sync-period=1s",
        # Between the starts of two controllers; the default is of use to large clusters.
        "--controller-start-interval=0s",
    ]


def scheduler(program: Path, keys: Path) -> Argv:
    return [
        program,
        f"--kubeconfig={keys}/scheduler.kubeconfig",
        "--leader-elect=false",
        "--secure-port=0",
    ]
