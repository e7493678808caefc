"""Who may connect to engines and routers. Pure.

Kubelet probes and port-forwarding pass every policy. Nothing limits what pods connect to: models
come from hubs and stores anywhere.
"""

from __future__ import annotations

from kvoy_contract.names import (
    COMPONENT_LABEL,
    DEFAULT_ENGINE_PORT,
    DEFAULT_ROUTER_PORT,
    ENGINE_COMPONENT,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROUTER_ADMIN_PORT,
    ROUTER_COMPONENT,
    TELEMETRY_PORT_OFFSET,
)
from kvoy_operator.identity import (
    Manifest,
    Owner,
    child,
    child_labels,
    engine_selector,
    engines_name,
    router_name,
    router_selector,
)
from kvoy_operator.options import RenderOptions
from kvoy_operator.resources import LLMService


def engine_policy(service: LLMService, options: RenderOptions) -> Manifest:
    """Engines hear routers, each other, and whoever scrapes metrics.

    Any router of the namespace, since a shared one may take the service in at any time; which of
    them is trusted is a matter of the internal secret.
    """
    selector = engine_selector(service.name)
    routers = {MANAGED_BY_LABEL: MANAGED_BY, COMPONENT_LABEL: ROUTER_COMPONENT}
    telemetry_port = DEFAULT_ENGINE_PORT + TELEMETRY_PORT_OFFSET
    rules = [
        {"from": [_pods(routers)], "ports": _ports(DEFAULT_ENGINE_PORT, telemetry_port)},
        # All ports: collective libraries choose theirs at will.
        {"from": [_pods(selector)]},
        *_metrics_rule(options, DEFAULT_ENGINE_PORT),
    ]
    return _policy(service, engines_name(service.name), ENGINE_COMPONENT, selector, rules)


def router_policy(owner: Owner, options: RenderOptions) -> Manifest:
    """The API is open; the admin port is for whoever scrapes metrics."""
    rules = [
        {"ports": _ports(DEFAULT_ROUTER_PORT)},
        *_metrics_rule(options, ROUTER_ADMIN_PORT),
    ]
    selector = router_selector(owner)
    return _policy(owner, router_name(owner.name), ROUTER_COMPONENT, selector, rules)


def _policy(
    owner: Owner, name: str, component: str, selector: dict[str, str], rules: list[Manifest]
) -> Manifest:
    labels = child_labels(owner, component)
    policy = child(owner, "networking.k8s.io/v1", "NetworkPolicy", name, labels)
    return policy | {
        "spec": {
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        }
    }


def _metrics_rule(options: RenderOptions, port: int) -> list[Manifest]:
    if not options.metrics_namespaces:
        return []
    requirement = {
        "key": "kubernetes.io/metadata.name",
        "operator": "In",
        "values": list(options.metrics_namespaces),
    }
    source = {"namespaceSelector": {"matchExpressions": [requirement]}}
    return [{"from": [source], "ports": _ports(port)}]


def _pods(match_labels: dict[str, str]) -> Manifest:
    return {"podSelector": {"matchLabels": match_labels}}


def _ports(*numbers: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": number} for number in numbers]
