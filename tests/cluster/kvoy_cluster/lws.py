"""The LeaderWorkerSet controller as a process beside the API server. Pure: what it is given.

In a cluster it runs in a pod and its webhooks are reached by a Service; here the API server calls
them by URL on loopback.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import yaml

from kvoy_cluster.components import LOOPBACK

API = "/apis/leaderworkerset.x-k8s.io/v1"

# As the controller's own installation narrows its webhooks for pods.
_GROUP_PODS = {
    "matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]
}


def configuration(port: int, certificates: Path) -> dict[str, Any]:
    """Its configuration file; `certificates` is a folder with tls.crt and tls.key."""
    return {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": LOOPBACK, "port": port, "certDir": str(certificates)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": "0"},
        "clientConnection": {"qps": 200, "burst": 400},
    }


def webhooks(manifests: str, port: int, authority: bytes) -> list[dict[str, Any]]:
    """The webhook configurations in `manifests`, for a server at `port` signed by `authority`."""
    configurations: list[dict[str, Any]] = list(yaml.safe_load_all(manifests))
    for configuration in configurations:
        configuration["metadata"]["name"] = f"lws-{configuration['metadata']['name']}"
        for webhook in configuration["webhooks"]:
            path = webhook["clientConfig"].pop("service")["path"]
            webhook["clientConfig"] = {
                "url": f"https://{LOOPBACK}:{port}{path}",
                "caBundle": base64.b64encode(authority).decode(),
            }
            if webhook["name"].endswith("pod.kb.io"):
                webhook["objectSelector"] = _GROUP_PODS
    return configurations


def smallest_group(namespace: str) -> dict[str, Any]:
    """A LeaderWorkerSet to try whether the webhooks answer, by a dry run."""
    container = {"name": "none", "image": "localhost/none:1"}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {"leaderWorkerTemplate": {"workerTemplate": {"spec": {"containers": [container]}}}},
    }
