"""How many replicas each pool should have, and who says so. Pure.

The serving pool's count is the service's own `spec.replicas`, which `/scale` writes. A resource
has one `/scale`, so a prefill pool has an LLMRoleScaler for its own: once somebody else has written
that scaler's count (an autoscaler, `kubectl scale`), or the service gives none, the scaler decides
and the service's `prefill.replicas` is left alone. Deleting the scaler gives the count back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvoy_contract.names import PREFILL_POOL, SERVING_POOL
from kvoy_operator.observed import Body
from kvoy_operator.resources import SCALER_KIND, SERVICE_KIND, LLMService

FIELD_MANAGER: Final = "kvoy-operator"
"""Writes all that the operator renders."""
SCALE_MANAGER: Final = "kvoy-operator-scale"
"""Writes `spec.replicas` alone."""
DEFAULT_REPLICAS: Final = 1


@dataclass(frozen=True, slots=True)
class PoolCount:
    desired: int
    owner: str
    """Kind of the object whose count it is: LLMService or LLMRoleScaler."""
    scaler_replicas: int | None = None
    """What the operator has to write into the scaler's `spec.replicas`; None: nothing."""


def pool_counts(service: LLMService, scaler: Body | None) -> dict[str, PoolCount]:
    """By pool; `scaler` is the prefill pool's LLMRoleScaler as it is now, None: not there yet."""
    counts = {SERVING_POOL: PoolCount(service.spec.replicas, SERVICE_KIND)}
    if service.spec.prefill is not None:
        counts[PREFILL_POOL] = _prefill_count(service.spec.prefill.replicas, scaler)
    return counts


def foreign_manager(managed_fields: Iterable[Mapping[str, Any]]) -> str | None:
    """Who besides the operator has written `spec.replicas`; None: nobody."""
    managers = (
        str(entry.get("manager", ""))
        for entry in managed_fields
        if "f:replicas" in _spec_fields(entry)
    )
    ours = (FIELD_MANAGER, SCALE_MANAGER)
    return min((manager for manager in managers if manager not in ours), default=None)


def _is_tracked(managed_fields: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the API server will say who writes `spec.replicas` next.

    It keeps no managedFields of writes by a custom resource's `/scale` to a field that has none
    (https://github.com/kubernetes/kubernetes/issues/131892), as a defaulted one has not.
    """
    return any("f:replicas" in _spec_fields(entry) for entry in managed_fields)


def _spec_fields(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = (entry.get("fieldsV1") or {}).get("f:spec") or {}
    return fields


def _prefill_count(given: int | None, scaler: Body | None) -> PoolCount:
    present = None if scaler is None else (scaler.get("spec") or {}).get("replicas")
    managed_fields = [] if scaler is None else scaler["metadata"].get("managedFields") or []
    if present is not None and foreign_manager(managed_fields) is not None:
        return PoolCount(present, SCALER_KIND)
    # What nobody is known to have written is written once, so that the next writer is known.
    is_due = scaler is not None and not _is_tracked(managed_fields)
    if given is not None:
        is_due = is_due or (scaler is not None and present != given)
        return PoolCount(given, SERVICE_KIND, given if is_due else None)
    # An autoscaler leaves alone what it finds at zero or unset.
    count = DEFAULT_REPLICAS if present is None else present
    return PoolCount(count, SCALER_KIND, count if is_due else None)
