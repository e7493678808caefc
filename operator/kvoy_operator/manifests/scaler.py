"""The LLMRoleScaler of a prefill pool: a resource has one `/scale`, and the service's own scales
its serving pool. Pure.
"""

from __future__ import annotations

from kvoy_contract.names import API_GROUP, API_VERSION, PREFILL_POOL
from kvoy_operator.identity import Manifest, child, child_labels, prefill_scaler_name
from kvoy_operator.resources import SCALER_KIND, LLMService


def render_scaler(service: LLMService) -> Manifest | None:
    """None without a prefill pool.

    Without `spec.replicas`: who has that number depends on who wrote it last.
    """
    if service.spec.prefill is None:
        return None
    name = prefill_scaler_name(service.name)
    labels = child_labels(service, pool=PREFILL_POOL)
    scaler = child(service, f"{API_GROUP}/{API_VERSION}", SCALER_KIND, name, labels)
    return scaler | {"spec": {"service": service.name, "pool": PREFILL_POOL}}
