"""What the API server refuses, in words for a condition: what it says, and what to do. Pure."""

from __future__ import annotations

from typing import Final

from kvoy_contract.names import COMPONENT_LABEL, ROUTER_COMPONENT
from kvoy_operator.acceptance import Refusal
from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.failures import FailureReason, quoted, remedy_of
from kvoy_operator.observed import Body

_REFUSED_RECHECK_S: Final = 30.0
"""So long until another look when somebody else may have made room in the meantime: by no event
that is watched."""
_POLICY: Final = "A policy of the cluster forbids it: change what it names, or ask who runs it."
_RIGHT: Final = "The operator lacks this right: upgrade its chart, which has its roles."
_ENGINE_FIELDS: Final = (
    "Correct what it names: in resources, engine, engine.podTemplate or podTemplate."
)
_ROUTER_FIELDS: Final = "Correct what it names: in the router's resources or podTemplate."
_FIELDS: Final = {
    "Deployment": _ENGINE_FIELDS,
    "Job": _ENGINE_FIELDS,
    "LeaderWorkerSet": _ENGINE_FIELDS,
    "PersistentVolumeClaim": "Correct what it names: in model.cache.pvc.",
}


def refusal_by(error: ApiRefusal, manifest: Body) -> Refusal | None:
    """What to tell the user of a refusal; None: it may pass, so it is an error to try again."""
    if error.is_namespace_terminating:
        return None
    if error.is_quota_exceeded:
        return _refusal("QuotaExceeded", error, manifest, remedy_of(FailureReason.QUOTA_EXCEEDED))
    if error.is_forbidden:
        remedy = _RIGHT if error.is_missing_right else _POLICY
        return _refusal("Forbidden", error, manifest, remedy)
    if error.is_invalid:
        return _refusal("InvalidSpec", error, manifest, _fields_behind(manifest))
    return None


def server_fault(error: ApiRefusal) -> Refusal:
    """Of a fault that lasts, whatever was to be written."""
    message = quoted(f"The API server: {error.message}").rstrip(".")
    return Refusal("ApiServerFault", f"{message}. It is tried again; repair what it names.")


def recheck_after_s(refusal: Refusal) -> float | None:
    """When a refusal may have lost its cause without a change that is watched; None: never."""
    return None if refusal.reason == "InvalidSpec" else _REFUSED_RECHECK_S


def _refusal(reason: str, error: ApiRefusal, manifest: Body, remedy: str) -> Refusal:
    said = quoted(f"{manifest['kind']} {manifest['metadata']['name']}: {error.message}")
    return Refusal(reason, f"{said.rstrip('.')}. {remedy}" if remedy else said)


def _fields_behind(manifest: Body) -> str:
    labels = manifest["metadata"].get("labels") or {}
    if manifest["kind"] == "Deployment" and labels.get(COMPONENT_LABEL) == ROUTER_COMPONENT:
        return _ROUTER_FIELDS
    return _FIELDS.get(manifest["kind"], "")
