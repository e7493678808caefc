"""From pods to engines: which pods are engines, where they listen, and who owns an address now.

Addresses are used again: an ended pod's may be another's before the API has told of it.
Knows neither the API nor who may be trusted: see `kube_api` and `kube_owners`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

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


def _is_same(one: Pod, other: Pod) -> bool:
    version = other.metadata.resource_version
    metadata = msgspec.structs.replace(one.metadata, resource_version=version)
    return metadata == other.metadata and one.spec == other.spec and one.status == other.status


class PodTable:
    """All candidates, and in which order they came to their addresses."""

    def __init__(self) -> None:
        self.by_uid: dict[str, Pod] = {}
        self._claims: dict[str, tuple[str, int]] = {}
        """Uid → the address that the pod claims, and the number of that claim."""
        self._num_claims = 0

    def replace(self, pods: Iterable[Pod]) -> None:
        """These are all the pods there are."""
        self.by_uid = {pod.metadata.uid: pod for pod in pods if is_candidate(pod)}
        for uid in self._claims.keys() - self.by_uid.keys():
            del self._claims[uid]
        for pod in sorted(self.by_uid.values(), key=lambda pod: pod.status.start_time):
            self._note_claim(pod)

    def put(self, pod: Pod) -> bool:
        """Whether it is news: most changes of a pod are to parts that nobody looks at here."""
        if not is_candidate(pod):
            return self.remove(pod)
        before = self.by_uid.get(pod.metadata.uid)
        self.by_uid[pod.metadata.uid] = pod
        self._note_claim(pod)
        return before is None or not _is_same(before, pod)

    def remove(self, pod: Pod) -> bool:
        self._claims.pop(pod.metadata.uid, None)
        return self.by_uid.pop(pod.metadata.uid, None) is not None

    def holders(self, pods: Iterable[Pod]) -> list[Pod]:
        """Of those that claim one address, the one that has it: what is leaving has lost it to
        what is not, and an earlier claim to a later one."""

        def strength(pod: Pod) -> tuple[bool, int]:
            return not is_leaving(pod), self._claims[pod.metadata.uid][1]

        return list({address_of(pod).http: pod for pod in sorted(pods, key=strength)}.values())

    def _note_claim(self, pod: Pod) -> None:
        uid, address = pod.metadata.uid, address_of(pod).http
        if self._claims.get(uid, ("", 0))[0] != address:
            self._num_claims += 1
            self._claims[uid] = (address, self._num_claims)
