"""Pieces that several pod templates share. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvoy_operator.identity import Manifest

USER_ID: Final = 65532
"""The user that Kvoy's images run as."""

HOSTNAME_KEY: Final = "kubernetes.io/hostname"
ZONE_KEY: Final = "topology.kubernetes.io/zone"
TMP_VOLUME: Final = "tmp"


def restricted_pod() -> Manifest:
    """The pod's half of what the PodSecurity level `restricted` asks for."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        # Only a fresh volume is walked: changing the owner of a large cache takes minutes.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def restricted_container() -> Manifest:
    """A container's half, and a root file system that nothing can be written to."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def http_probe(path: str, port: str, *, period_s: int, failures: int, timeout_s: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": timeout_s,
    }


def sleep_before_stop(seconds: int) -> Manifest:
    """Holds SIGTERM back until others have seen that the pod goes."""
    return {"preStop": {"sleep": {"seconds": seconds}}}


def spread_softly(match_labels: Mapping[str, str]) -> list[Manifest]:
    """Over nodes and zones where there is room; never a reason not to be scheduled."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(match_labels)},
        }
        for key in (HOSTNAME_KEY, ZONE_KEY)
    ]


def tmp_volume() -> Manifest:
    """Without a limit: to pass one is to be evicted, and the kubelet guards the node's disk."""
    return {"name": TMP_VOLUME, "emptyDir": {}}


def tmp_mount() -> Manifest:
    return {"name": TMP_VOLUME, "mountPath": "/tmp"}


def references(names: Iterable[str]) -> list[Manifest]:
    """Names as Kubernetes lists them in `imagePullSecrets`; each once, in the given order."""
    return [{"name": name} for name in dict.fromkeys(names)]
