"""What stands around a service's engines: secrets, Services, policies, its own router. Pure."""

from __future__ import annotations

from kvoy_contract.fleet import DEFAULT_WEIGHT, Fleet, FleetService
from kvoy_contract.names import DEFAULT_ENGINE_PORT, ENGINE_COMPONENT, TELEMETRY_PORT_OFFSET
from kvoy_operator.identity import (
    Manifest,
    child,
    child_labels,
    engine_selector,
    engines_name,
)
from kvoy_operator.manifests.access import internal_secret
from kvoy_operator.manifests.engine import service_pull_secrets
from kvoy_operator.manifests.model_cache import render_model_cache
from kvoy_operator.manifests.network import engine_policy
from kvoy_operator.manifests.router import RouterPlan, render_router
from kvoy_operator.manifests.scaler import render_scaler
from kvoy_operator.options import RenderOptions, service_secret
from kvoy_operator.resources import LLMService


def render_support(service: LLMService, options: RenderOptions) -> list[Manifest]:
    """All children but the workloads, in the order in which they should be created.

    Raises InvalidSpec when a `podTemplate` of the spec is no patch of a pod.
    """
    scaler = render_scaler(service)
    policies = [engine_policy(service, options)] if options.has_network_policies else []
    return [
        internal_secret(service, options),
        *policies,
        _engines_service(service),
        *_own_router(service, options),
        *render_model_cache(service, options),
        *([scaler] if scaler is not None else []),
    ]


def fleet_service(
    service: LLMService, options: RenderOptions, weight: int = DEFAULT_WEIGHT
) -> FleetService:
    """What a router is told about a service."""
    return FleetService(
        name=service.name,
        uid=service.uid,
        model=service.model_name,
        secret=service_secret(options, service.namespace, service.name),
        weight=weight,
    )


def _own_router(service: LLMService, options: RenderOptions) -> list[Manifest]:
    """Nothing when a shared router serves the service."""
    settings = service.spec.router
    if settings.ref is not None:
        return []
    plan = RouterPlan(
        owner=service,
        settings=settings,
        field="spec.router",
        fleet=Fleet(services=(fleet_service(service, options),)),
        pull_secrets=service_pull_secrets(service, options),
    )
    return render_router(plan, options)


def _engines_service(service: LLMService) -> Manifest:
    """Names for all engines in the cluster's DNS, from their first second on.

    Nothing sends requests through it: routers choose a pod themselves.
    """
    labels = child_labels(service, ENGINE_COMPONENT)
    headless = child(service, "v1", "Service", engines_name(service.name), labels)
    ports = {
        "http": DEFAULT_ENGINE_PORT,
        "telemetry": DEFAULT_ENGINE_PORT + TELEMETRY_PORT_OFFSET,
    }
    return headless | {
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": engine_selector(service.name),
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
                for name, port in ports.items()
            ],
        }
    }
