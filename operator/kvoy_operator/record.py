"""One watched object as the store keeps it: stripped, encoded, and with the keys that it concerns.

Pure. A thousand services have some thirteen thousand objects: each is kept as bytes without what
nobody reads, and pods, which change most and are asked for most, as values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvoy_contract.names import (
    API_GROUP,
    COMPONENT_LABEL,
    ENGINE_COMPONENT,
    ROUTER_LABEL,
    SERVICE_LABEL,
)
from kvoy_operator.kinds import (
    DEPLOYMENT,
    JOB,
    LEADER_WORKER_SET,
    LLM_ROLE_SCALER,
    LLM_ROUTER,
    LLM_SERVICE,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    Kind,
)
from kvoy_operator.observed import Body, PodView, WorkloadView
from kvoy_operator.views import pod_view, workload_view


class Key(NamedTuple):
    """What is reconciled: an LLMService or an LLMRouter."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.namespace}/{self.name}"


class Ref(NamedTuple):
    """Which object."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Record:
    ref: Ref
    uid: str
    version: int
    """The resourceVersion: newer objects of one kind have a larger one."""
    keys: tuple[Key, ...]
    """Who has to look when it changes: its controller, else whom its labels name."""
    data: bytes = b""
    """The stripped object, encoded; empty for a pod."""
    view: PodView | WorkloadView | None = None

    def body(self) -> dict[str, Any]:
        decoded: dict[str, Any] = msgspec.json.decode(self.data)
        return decoded


def record_of(kind: Kind, body: Mapping[str, Any]) -> Record:
    """What to keep of `body`, an object of `kind` as the API server gave it."""
    metadata = body["metadata"]
    ref = Ref(kind.name, metadata["namespace"], metadata["name"])
    uid, version = metadata["uid"], int(metadata["resourceVersion"])
    keys = keys_of(kind, metadata)
    if kind == POD:
        return Record(ref, uid, version, keys, view=pod_view(body))
    view = workload_view(kind.name, body) if is_engine_workload(kind, metadata) else None
    return Record(ref, uid, version, keys, msgspec.json.encode(strip(kind, body)), view)


def is_engine_workload(kind: Kind, metadata: Mapping[str, Any]) -> bool:
    labels = metadata.get("labels") or {}
    is_workload = kind in (DEPLOYMENT, LEADER_WORKER_SET)
    return is_workload and labels.get(COMPONENT_LABEL) == ENGINE_COMPONENT


def keys_of(kind: Kind, metadata: Mapping[str, Any]) -> tuple[Key, ...]:
    """The service or router that an object belongs to; itself, when it is one."""
    namespace = metadata["namespace"]
    if kind in (LLM_SERVICE, LLM_ROUTER):
        return (Key(kind.name, namespace, metadata["name"]),)
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller") and owner["apiVersion"].startswith(f"{API_GROUP}/"):
            return (Key(owner["kind"], namespace, owner["name"]),)
    labels = metadata.get("labels") or {}
    if SERVICE_LABEL in labels:
        return (Key(LLM_SERVICE.name, namespace, labels[SERVICE_LABEL]),)
    if ROUTER_LABEL in labels:
        return (Key(LLM_ROUTER.name, namespace, labels[ROUTER_LABEL]),)
    return ()


_UNREAD_ANNOTATIONS = (
    "kubectl.kubernetes.io/last-applied-configuration",
    "deployment.kubernetes.io/revision",
)
_WITH_STATUS = frozenset(
    kind.name
    for kind in (
        LLM_SERVICE,
        LLM_ROUTER,
        LLM_ROLE_SCALER,
        DEPLOYMENT,
        LEADER_WORKER_SET,
        JOB,
        PERSISTENT_VOLUME_CLAIM,
    )
)


def strip(kind: Kind, body: Body) -> dict[str, Any]:
    """A copy without what nothing reads: bookkeeping, foreign status, an engine's pod template.

    An engine's template is written once and never compared again, and is most of a workload.
    """
    metadata = {
        name: value
        for name, value in body["metadata"].items()
        if name not in ("managedFields", "selfLink", "annotations")
    }
    annotations = {
        name: value
        for name, value in (body["metadata"].get("annotations") or {}).items()
        if name not in _UNREAD_ANNOTATIONS
    }
    if annotations:
        metadata["annotations"] = annotations
    if kind in (LLM_SERVICE, LLM_ROLE_SCALER):
        metadata["managedFields"] = _replicas_owners(body["metadata"].get("managedFields") or ())
    stripped = {name: value for name, value in body.items() if name != "status"}
    stripped |= {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}
    if kind.name in _WITH_STATUS and body.get("status"):
        stripped["status"] = body["status"]
    if is_engine_workload(kind, metadata):
        unread = ("template", "leaderWorkerTemplate")
        spec = {name: value for name, value in body["spec"].items() if name not in unread}
        stripped["spec"] = spec
    return stripped


def _replicas_owners(managed_fields: Any) -> list[dict[str, Any]]:
    """Who owns `spec.replicas`: all that is read of managedFields."""
    return [
        {
            "manager": entry.get("manager", ""),
            "operation": entry.get("operation", ""),
            "subresource": entry.get("subresource", ""),
            "fieldsV1": {"f:spec": {"f:replicas": {}}},
        }
        for entry in managed_fields
        if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    ]
