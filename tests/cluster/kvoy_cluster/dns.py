"""The cluster's DNS: CoreDNS beside the API server, and the Service that pods ask. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvoy_cluster.components import DNS_DOMAIN, DNS_SERVICE

READY_PORT = 8181
_NAMESPACE = "kube-system"
_SERVICE = "kube-dns"


def configuration(address: str, kubeconfig: Path) -> str:
    """Answers for the cluster's names; every other name does not exist.

    Two server blocks, as the `template` plugin would answer before `kubernetes` within one.
    """
    return f"""\
{DNS_DOMAIN}:53 in-addr.arpa:53 ip6.arpa:53 {{
    bind {address}
    errors
    ready {address}:{READY_PORT}
    kubernetes {DNS_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
    cache 1
}}
.:53 {{
    bind {address}
    errors
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
}}
"""


def objects(address: str) -> dict[str, dict[str, Any]]:
    """The Service and its endpoint, by the API path each is applied at."""
    ports = [("dns", "UDP"), ("dns-tcp", "TCP")]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _SERVICE, "labels": {"k8s-app": _SERVICE}},
        "spec": {
            "clusterIP": DNS_SERVICE,
            "ports": [{"name": name, "port": 53, "protocol": kind} for name, kind in ports],
        },
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{_SERVICE}-process",
            "labels": {"kubernetes.io/service-name": _SERVICE},
        },
        "addressType": "IPv4",
        "ports": [{"name": name, "port": 53, "protocol": kind} for name, kind in ports],
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
    }
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{_NAMESPACE}/endpointslices"
    return {
        f"/api/v1/namespaces/{_NAMESPACE}/services/{_SERVICE}": service,
        f"{slices}/{_SERVICE}-process": endpoints,
    }
