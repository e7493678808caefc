"""Argo CD's health checks, in the Lua that it runs, on statuses as the operator writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from kvoy_operator import conditions
from kvoy_operator.conditions import Condition, RouterState
from kvoy_operator.render_testing import make_router, make_service
from kvoy_operator.status import router_status

HEALTH = Path(__file__).parents[2] / "deploy/argocd/health.yaml"
FINE = {
    "Accepted": ("True", "Accepted"),
    "Ready": ("True", "AllReady"),
    "Progressing": ("False", "Settled"),
    "Degraded": ("False", "AsExpected"),
    "RouterReady": ("True", "RouterAvailable"),
}


def _health(kind: str, resource: dict[str, Any]) -> tuple[str, str]:
    """Argo CD's status and message for the resource."""
    scripts = yaml.safe_load(HEALTH.read_text())["data"]
    lua = LuaRuntime()
    lua.globals().obj = lua.table_from(resource, recursive=True)
    found = lua.execute(scripts[f"resource.customizations.health.kvoy.dev_{kind}"])
    return found["status"], found["message"]


def _service(changed: dict[str, tuple[str, str]], *, generation: int = 1) -> dict[str, Any]:
    """`changed` are conditions: status and reason."""
    shown = [
        Condition(name, status == "True", reason, f"{name} says {reason}")
        for name, (status, reason) in {**FINE, **changed}.items()
    ]
    listed = conditions.as_status(shown, (), 1, now_s=0.0)
    status = {"observedGeneration": 1, "conditions": listed}
    return {"metadata": {"generation": generation}, "status": status}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ("Healthy", "Ready says AllReady")),
        ({"Ready": ("True", "MinimumReady")}, ("Healthy", "Ready says MinimumReady")),
        ({"Accepted": ("False", "NameClash")}, ("Degraded", "Accepted says NameClash")),
        (
            {"Degraded": ("True", "CrashLoop"), "Progressing": ("True", "RollingOut")},
            ("Degraded", "Degraded says CrashLoop"),
        ),
        (
            {"Progressing": ("True", "RollingOut")},
            ("Progressing", "Progressing says RollingOut"),
        ),
        ({"Ready": ("False", "RouterNotReady")}, ("Progressing", "Ready says RouterNotReady")),
        ({"Ready": ("False", "ScaledToZero")}, ("Suspended", "Ready says ScaledToZero")),
    ],
)
def test_a_services_health_follows_its_conditions(
    changed: dict[str, tuple[str, str]], expected: tuple[str, str]
) -> None:
    assert _health("LLMService", _service(changed)) == expected


@pytest.mark.parametrize("kind", ["LLMService", "LLMRouter"])
def test_what_the_operator_has_not_seen_is_progressing(kind: str) -> None:
    unseen = {"metadata": {"generation": 1}}

    assert _health(kind, unseen)[0] == "Progressing"
    assert _health(kind, _service({}, generation=2))[0] == "Progressing"


@pytest.mark.parametrize(("is_ready", "expected"), [(True, "Healthy"), (False, "Progressing")])
def test_a_shared_routers_health_is_its_readiness(is_ready: bool, expected: str) -> None:
    state = RouterState(is_ready, "Any", "2 of 2 router pods ready.")
    router = make_router()
    status = router_status(router, [(make_service(), 100)], state, (2, 2), None, now_s=0.0)

    health = _health("LLMRouter", {"metadata": {"generation": 1}, "status": status})

    assert health == (expected, "2 of 2 router pods ready.")
