from __future__ import annotations

from typing import Any

import pytest

from kvoy_operator.render_testing import make_service
from kvoy_operator.scaling import PoolCount, foreign_manager, pool_counts

REPLICAS: dict[str, Any] = {"f:spec": {"f:replicas": {}}}
HPA = {"manager": "kube-controller-manager", "subresource": "scale", "fieldsV1": REPLICAS}
KUBECTL = {"manager": "kubectl", "subresource": "scale", "fieldsV1": REPLICAS}
OURS = {"manager": "kvoy-operator-scale", "fieldsV1": REPLICAS}


def _scaler(replicas: int | None, *managed_fields: dict[str, Any]) -> dict[str, Any]:
    spec = {} if replicas is None else {"replicas": replicas}
    return {"metadata": {"managedFields": list(managed_fields)}, "spec": spec}


def _prefill(given: int | None, scaler: dict[str, Any] | None) -> PoolCount:
    prefill = {} if given is None else {"replicas": given}
    service = make_service({"engine": {"kind": "sim"}, "prefill": prefill})
    return pool_counts(service, scaler)["prefill"]


def test_the_serving_pool_follows_the_service() -> None:
    counts = pool_counts(make_service({"replicas": 4}), None)

    assert counts == {"serving": PoolCount(4, "LLMService")}


@pytest.mark.parametrize(
    ("given", "scaler", "expected"),
    [
        (2, None, PoolCount(2, "LLMService")),
        (2, _scaler(None), PoolCount(2, "LLMService", scaler_replicas=2)),
        (2, _scaler(5, OURS), PoolCount(2, "LLMService", scaler_replicas=2)),
        (2, _scaler(2, OURS), PoolCount(2, "LLMService")),
        (2, _scaler(2), PoolCount(2, "LLMService", scaler_replicas=2)),
        (2, _scaler(5, KUBECTL), PoolCount(5, "LLMRoleScaler")),
        (2, _scaler(0, OURS, HPA), PoolCount(0, "LLMRoleScaler")),
        (None, None, PoolCount(1, "LLMRoleScaler")),
        (None, _scaler(None), PoolCount(1, "LLMRoleScaler", scaler_replicas=1)),
        (None, _scaler(1), PoolCount(1, "LLMRoleScaler", scaler_replicas=1)),
        (None, _scaler(3), PoolCount(3, "LLMRoleScaler", scaler_replicas=3)),
        (None, _scaler(3, OURS), PoolCount(3, "LLMRoleScaler")),
        (None, _scaler(3, HPA), PoolCount(3, "LLMRoleScaler")),
    ],
)
def test_a_prefill_pool_follows_who_wrote_last(
    given: int | None, scaler: dict[str, Any] | None, expected: PoolCount
) -> None:
    assert _prefill(given, scaler) == expected


def test_only_writers_of_replicas_count_as_owners() -> None:
    other = {"manager": "helm", "fieldsV1": {"f:metadata": {"f:labels": {}}}}

    assert foreign_manager([OURS, other]) is None
    assert foreign_manager([OURS, other, KUBECTL]) == "kubectl"
