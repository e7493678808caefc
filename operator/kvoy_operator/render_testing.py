"""Custom resources and options for tests: parsed from the YAML's own form, with the rest filled in.

Nothing that runs in a cluster imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvoy_contract.names import API_GROUP, API_VERSION
from kvoy_operator.identity import Manifest
from kvoy_operator.options import RenderOptions
from kvoy_operator.resources import (
    ROUTER_KIND,
    SERVICE_KIND,
    LLMRouter,
    LLMService,
    parse_router,
    parse_service,
)

LONGEST_NAME: Final = "a-service-whose-name-has-forty-chars-abc"
_OPTIONS: Final = RenderOptions(
    router_image="localhost/kvoy/router:1",
    engine_image="localhost/kvoy/engine:1-cpu",
    engine_cuda_image="localhost/kvoy/engine:1-cuda",
    sim_image="localhost/kvoy/engine:1-sim",
    master_secret=bytes(range(32)),
)


def make_options(**changes: Any) -> RenderOptions:
    return replace(_OPTIONS, **changes)


def service_body(
    spec: Mapping[str, Any] | None = None, *, name: str = "qwen", **metadata: Any
) -> Manifest:
    """An LLMService as the API server gives it; without `model` in `spec`, of a small hub model."""
    model = {"model": {"uri": "hf://Qwen/Qwen3-0.6B"}}
    return _body(SERVICE_KIND, {**model, **(spec or {})}, name, metadata)


def make_service(
    spec: Mapping[str, Any] | None = None, *, name: str = "qwen", **metadata: Any
) -> LLMService:
    return parse_service(service_body(spec, name=name, **metadata))


def router_body(
    spec: Mapping[str, Any] | None = None, *, name: str = "shared", **metadata: Any
) -> Manifest:
    """An LLMRouter as the API server gives it."""
    return _body(ROUTER_KIND, spec or {}, name, metadata)


def make_router(
    spec: Mapping[str, Any] | None = None, *, name: str = "shared", **metadata: Any
) -> LLMRouter:
    return parse_router(router_body(spec, name=name, **metadata))


def _body(kind: str, spec: Mapping[str, Any], name: str, metadata: Mapping[str, Any]) -> Manifest:
    identity = {"name": name, "namespace": "default", "uid": f"uid-of-{name}", "generation": 1}
    return {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": kind,
        "metadata": {**identity, **metadata},
        "spec": dict(spec),
    }
