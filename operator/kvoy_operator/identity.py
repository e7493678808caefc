"""Who a child belongs to: its name, its labels, its owner reference. Pure.

Every name is derived from the resource's own name, of at most 40 characters, so that all that
Kubernetes and LeaderWorkerSet make of it (ReplicaSets, pods, StatefulSets, revision labels) stays
within the 63 characters of a label. Model ids never enter a name or a label: they have slashes,
colons and any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from kvoy_contract.names import (
    API_GROUP,
    API_VERSION,
    COMPONENT_LABEL,
    ENGINE_COMPONENT,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    POOL_LABEL,
    PREFILL_POOL,
    REVISION_LABEL,
    ROUTER_COMPONENT,
    ROUTER_LABEL,
    SERVICE_LABEL,
    SERVING_POOL,
)
from kvoy_operator.resources import SERVICE_KIND, Resource

Manifest: TypeAlias = dict[str, Any]
"""A Kubernetes object as plain data: its schema is the API server's, not ours."""
Owner: TypeAlias = Resource[Any]
"""A custom resource of any kind; nothing here reads its spec."""

REVISION_CHARS: Final = 5
"""With one more, the workers of a thousandth group could not be labelled by their revision."""

NAME_LABEL: Final = "app.kubernetes.io/name"
_APP_NAME: Final = "kvoy"
MODEL_ANNOTATION: Final = "kvoy.dev/model"
"""The model's name in requests, in full."""
MODEL_URI_ANNOTATION: Final = "kvoy.dev/model-uri"

_POOL_LETTERS: Final = {SERVING_POOL: "s", PREFILL_POOL: "p"}
# Labels by which controllers know their own pods: a user's value there would break them.
_CONTROLLER_LABEL_PREFIXES: Final = (
    f"{API_GROUP}/",
    "leaderworkerset.sigs.k8s.io/",
    "batch.kubernetes.io/",
    "statefulset.kubernetes.io/",
)
_CONTROLLER_LABELS: Final = frozenset(
    {"pod-template-hash", "controller-revision-hash", "job-name", "controller-uid"}
)


def workload_name(service: str, pool: str, revision: str) -> str:
    """The Deployment or LeaderWorkerSet of a pool in one revision."""
    return f"{service}-{_POOL_LETTERS[pool]}-{revision}"


def engines_name(service: str) -> str:
    """The headless Service and the NetworkPolicy of a service's engines."""
    return f"{service}-engines"


def router_name(owner: str) -> str:
    """The router's Deployment, ServiceAccount, PodDisruptionBudget and NetworkPolicy."""
    return f"{owner}-router"


def api_service_name(owner: str) -> str:
    """The Service that clients call."""
    return owner


def internal_secret_name(service: str) -> str:
    """The Secret that engines and routers of the service share."""
    return f"{service}-internal"


def fleet_secret_name(owner: str) -> str:
    """The Secret with the router's fleet document."""
    return f"{owner}-fleet"


def cache_claim_name(service: str) -> str:
    """The PersistentVolumeClaim that holds the service's model."""
    return f"{service}-model-cache"


def fetch_job_name(service: str, content: str) -> str:
    """The Job that fills a claim; `content` is a short hash of what it brings."""
    return f"{service}-fetch-{content}"


def prefill_scaler_name(service: str) -> str:
    return f"{service}-{PREFILL_POOL}"


def endpoint_url(owner: str, namespace: str, *, is_tls: bool) -> str:
    """Where clients inside the cluster find the OpenAI API."""
    return f"{'https' if is_tls else 'http'}://{api_service_name(owner)}.{namespace}.svc/v1"


def owner_reference(owner: Owner) -> Manifest:
    """Makes garbage collection delete the child with its owner."""
    return {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def propagated_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """A resource's own labels, without those that only controllers may set."""
    return {
        key: value
        for key, value in labels.items()
        if key not in _CONTROLLER_LABELS and not key.startswith(_CONTROLLER_LABEL_PREFIXES)
    }


def owner_label(owner: Owner) -> dict[str, str]:
    """The label that says whose part an object is: a service's, or a shared router's."""
    key = SERVICE_LABEL if owner.kind == SERVICE_KIND else ROUTER_LABEL
    return {key: owner.name}


def child_labels(
    owner: Owner, component: str = "", pool: str = "", revision: str = ""
) -> dict[str, str]:
    """All labels of a child and of its pods; ours win over the resource's own."""
    ours = {
        MANAGED_BY_LABEL: MANAGED_BY,
        NAME_LABEL: _APP_NAME,
        **owner_label(owner),
        COMPONENT_LABEL: component,
        POOL_LABEL: pool,
        REVISION_LABEL: revision,
    }
    given = {key: value for key, value in ours.items() if value}
    return propagated_labels(owner.labels) | given


def engine_selector(service: str, pool: str = "", revision: str = "") -> dict[str, str]:
    """Matches a service's engine pods: all, of one pool, or of one pool's revision."""
    narrower = {POOL_LABEL: pool, REVISION_LABEL: revision}
    return {SERVICE_LABEL: service, COMPONENT_LABEL: ENGINE_COMPONENT} | {
        key: value for key, value in narrower.items() if value
    }


def router_selector(owner: Owner) -> dict[str, str]:
    """Matches the pods of the router that `owner` has."""
    return owner_label(owner) | {COMPONENT_LABEL: ROUTER_COMPONENT}


def child(
    owner: Owner,
    api_version: str,
    kind: str,
    name: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """The beginning of every child: what it is, and whose."""
    metadata: Manifest = {
        "name": name,
        "namespace": owner.namespace,
        "labels": dict(labels),
        "ownerReferences": [owner_reference(owner)],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
