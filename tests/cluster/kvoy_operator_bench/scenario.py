"""Which services the benchmark makes: a mix of what people write. Pure.

Of ten services six are plain, two have a prefill pool, and two share an LLMRouter with all others
of their namespace that do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvoy_operator.kinds import LLM_ROUTER, LLM_SERVICE, Kind

SHARED_ROUTER = "shared"
_SHARED_LABELS = {"example.com/endpoint": SHARED_ROUTER}
_PREFILL_PLACES = (6, 7)
_SHARED_PLACES = (8, 9)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A custom resource to create."""

    kind: Kind
    namespace: str
    name: str
    body: dict[str, Any]

    @property
    def path(self) -> str:
        return self.kind.path(self.namespace, self.name)


def scenario(num_services: int, namespaces: Sequence[str]) -> list[Wanted]:
    """Routers first; services go round the namespaces, ten at a time."""
    services = [
        service(number, namespaces[number // 10 % len(namespaces)])
        for number in range(num_services)
    ]
    shared = {each.namespace for each in services if "router" in each.body["spec"]}
    return [_shared_router(namespace) for namespace in sorted(shared)] + services


def service(number: int, namespace: str) -> Wanted:
    """The `number`-th service; its place in a ten says which sort it is."""
    place = number % 10
    spec: dict[str, Any] = {
        "model": {"uri": f"hf://example/model-{number}"},
        "engine": {"kind": "sim"},
    }
    labels: dict[str, str] = {}
    if place in _PREFILL_PLACES:
        spec["prefill"] = {"replicas": 1}
    elif place in _SHARED_PLACES:
        spec["router"] = {"ref": SHARED_ROUTER}
        labels = _SHARED_LABELS
    return _wanted(LLM_SERVICE, namespace, f"svc-{number:05}", spec, labels)


def _shared_router(namespace: str) -> Wanted:
    spec = {"selector": {"matchLabels": _SHARED_LABELS}}
    return _wanted(LLM_ROUTER, namespace, SHARED_ROUTER, spec, {})


def _wanted(
    kind: Kind, namespace: str, name: str, spec: dict[str, Any], labels: dict[str, str]
) -> Wanted:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    body = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "spec": spec}
    return Wanted(kind, namespace, name, body)
