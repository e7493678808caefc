"""From pods to engines: which pods are engines, where they listen, and who owns an address now.

Knows neither the API nor who may be trusted: see `kube_api` and `kube_owners`."""

from __future__ import annotations

from collections.abc import Iterable

from kvoy_contract.fleet import FleetService
from kvoy_contract.names import (
    DEFAULT_ENGINE_PORT,
    POOL_LABEL,
    REVISION_LABEL,
    TELEMETRY_PORT_OFFSET,
)
from kvoy_router.config import EngineAddress
from kvoy_router.endpoint import Origin
from kvoy_router.found import FoundEngine
from kvoy_router.kube_objects import Pod

WORKER_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
ENGINE_CONTAINER = "engine"
HTTP_PORT_NAME = "http"
TELEMETRY_PORT_NAME = "telemetry"
_ENDED = frozenset({"Succeeded", "Failed"})


def is_candidate(pod: Pod) -> bool:
    """Whether an engine may listen there: it has an address, has not ended, and is no worker of a
    group, whose leader speaks for all. Readiness does not matter: engines tell of it themselves."""
    index = (pod.metadata.labels or {}).get(WORKER_INDEX_LABEL, "0")
    return index == "0" and pod.status.phase not in _ENDED and bool(pod.status.pod_ip)


def is_leaving(pod: Pod) -> bool:
    return pod.metadata.deletion_timestamp is not None


def address_of(pod: Pod) -> EngineAddress:
    """Of a candidate. Named ports of its containers win over the usual numbers."""
    ip = pod.status.pod_ip or ""
    host = f"[{ip}]" if ":" in ip else ip
    http = _port_of(pod, HTTP_PORT_NAME, DEFAULT_ENGINE_PORT)
    telemetry = _port_of(pod, TELEMETRY_PORT_NAME, DEFAULT_ENGINE_PORT + TELEMETRY_PORT_OFFSET)
    return EngineAddress(f"{host}:{http}", f"{host}:{telemetry}")


def _port_of(pod: Pod, name: str, default: int) -> int:
    containers = sorted(pod.spec.containers, key=lambda c: c.name != ENGINE_CONTAINER)
    ports = (port for container in containers for port in container.ports or ())
    return next((port.container_port for port in ports if port.name == name), default)


def found_engine(pod: Pod, service: FleetService) -> FoundEngine:
    """A candidate that is known to belong to `service`."""
    labels = pod.metadata.labels or {}
    origin = Origin(
        service=service.name,
        pod=pod.metadata.name,
        pod_uid=pod.metadata.uid,
        pool=labels.get(POOL_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        secret=service.secret,
    )
    return FoundEngine(address_of(pod), origin, is_draining=is_leaving(pod))


def current_holders(pods: Iterable[Pod]) -> list[Pod]:
    """Of candidates that claim one address, the one that has it: what is leaving has lost it to
    what is not, and what is older to what is newer."""
    holders: dict[str, Pod] = {}
    for pod in sorted(pods, key=_claim):
        holders[address_of(pod).http] = pod
    return list(holders.values())


def _claim(pod: Pod) -> tuple[bool, str, str]:
    """The strongest comes last."""
    metadata = pod.metadata
    return not is_leaving(pod), metadata.creation_timestamp, metadata.uid
