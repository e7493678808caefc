"""Configuration files of a node's programs. Pure: everything in them comes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvoy_cluster.components import DNS_DOMAIN, DNS_SERVICE

CONTAINERD_SOCKET = Path("/run/containerd/containerd.sock")
"""In the node's own mount namespace."""
GPU_RESOURCE = "nvidia.com/gpu"
CNI_PROGRAMS = Path("/usr/lib/cni")
"""Where Debian has the network plugins."""
POD_RANGES = "10.244.0.0/16"


def containerd(folder: Path, pause_image: str) -> str:
    """`folder` keeps images and containers, and the network's configuration in `cni`."""
    return f"""\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause_image}"
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{CNI_PROGRAMS}"
  conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = false
"""


def pod_network(pod_range: str, addresses: Path) -> dict[str, Any]:
    """Each pod on a wire of its own: unlike on a bridge, all its packets pass the node's rules.

    `addresses` is a folder that keeps which are taken.
    """
    addressing = {
        "type": "host-local",
        "dataDir": str(addresses),
        "ranges": [[{"subnet": pod_range}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    wire = {"type": "ptp", "ipMasq": False, "ipam": addressing}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "kvoy", "plugins": [wire, ports]}


def kubelet(cgroup: str, authority: Path, resolver: Path) -> dict[str, Any]:
    """`authority`: who signed the API server's certificate; `resolver`: a resolv.conf for pods."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": DNS_DOMAIN,
        "resolvConf": str(resolver),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        # Images come from archives: one that was removed could not be pulled again.
        "imageGCHighThresholdPercent": 100,
        # Other programs fill this machine's disk, too; pods are not to pay for it.
        "evictionHard": {
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "memory.available": "50Mi",
        },
        "serializeImagePulls": False,
        # How soon a changed Secret shows in its mounts.
        "syncFrequency": "5s",
        "nodeStatusUpdateFrequency": "5s",
        "nodeLeaseDurationSeconds": 20,
        "shutdownGracePeriod": "0s",
    }


def kube_proxy(node: str, address: str, kubeconfig: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "iptables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": node,
        "clusterCIDR": POD_RANGES,
        "bindAddress": address,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        # The machine's connection tracking is not this node's to tune.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }
