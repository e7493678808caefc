"""A router and all that it needs, for one service's own router and for a shared one alike. Pure.

The fleet document and the configuration file are mounted, not hashed into the pods: a router reads
them again when they change, and so it does with users' own Secrets of keys and certificates.
Whatever else a router depends on stands in its pod template, so that a change rolls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvoy_contract.fleet import Fleet, render_fleet
from kvoy_contract.names import DEFAULT_ROUTER_PORT, ROUTER_ADMIN_PORT, ROUTER_COMPONENT
from kvoy_operator.identity import (
    Manifest,
    Owner,
    api_service_name,
    child,
    child_labels,
    fleet_secret_name,
    router_name,
    router_selector,
)
from kvoy_operator.manifests.access import opaque_secret, router_account, router_binding
from kvoy_operator.manifests.network import router_policy
from kvoy_operator.manifests.parts import (
    http_probe,
    references,
    restricted_container,
    restricted_pod,
    sleep_before_stop,
    spread_softly,
    tmp_mount,
    tmp_volume,
)
from kvoy_operator.manifests.router_config import render_router_config, request_timeout_s
from kvoy_operator.manifests.router_files import file_arguments, file_mounts, file_volumes
from kvoy_operator.options import RenderOptions
from kvoy_operator.pod_patch import merge_pod_template
from kvoy_operator.spec_router import RouterOptions

CONTAINER: Final = "router"
_API_PORT: Final = "api"
_ADMIN_PORT: Final = "admin"
_FLEET_VOLUME: Final = "fleet"
_FLEET_FOLDER: Final = "/etc/kvoy/fleet"
_FLEET_FILE: Final = "fleet.yaml"
_CONFIG_FILE: Final = "router.yaml"

# By then kube-proxy and load balancers have left the pod out.
_PRE_STOP_S: Final = 10
_EXIT_MARGIN_S: Final = 20
_PROGRESS_DEADLINE_S: Final = 600


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """A router to render: whose, how, and over which services."""

    owner: Owner
    settings: RouterOptions
    field: str
    """Path of the settings in the owner's YAML, for messages."""
    fleet: Fleet
    pull_secrets: tuple[str, ...]
    """Of the operator and of the service."""


def render_router(plan: RouterPlan, options: RenderOptions) -> list[Manifest]:
    """The router and its surroundings, in the order in which they should be created.

    Raises InvalidSpec when the `podTemplate` of its settings is no patch of a pod.
    """
    owner = plan.owner
    documents = {
        _FLEET_FILE: render_fleet(plan.fleet),
        _CONFIG_FILE: render_router_config(plan.settings, options.router_defaults),
    }
    policies = [router_policy(owner, options)] if options.has_network_policies else []
    return [
        opaque_secret(owner, fleet_secret_name(owner.name), ROUTER_COMPONENT, documents),
        router_account(owner, plan.pull_secrets),
        router_binding(owner, options),
        *policies,
        _api_service(plan),
        _deployment(plan, options),
        _disruption_budget(owner),
    ]


def _api_service(plan: RouterPlan) -> Manifest:
    owner = plan.owner
    labels = child_labels(owner, ROUTER_COMPONENT)
    service = child(owner, "v1", "Service", api_service_name(owner.name), labels)
    scheme, number = ("https", 443) if plan.settings.tls_secret_ref else ("http", 80)
    port = {"name": scheme, "port": number, "protocol": "TCP", "appProtocol": scheme}
    return service | {
        "spec": {
            "type": "ClusterIP",
            "selector": router_selector(owner),
            "ports": [port | {"targetPort": _API_PORT}],
        }
    }


def _deployment(plan: RouterPlan, options: RenderOptions) -> Manifest:
    owner = plan.owner
    labels = child_labels(owner, ROUTER_COMPONENT)
    deployment = child(owner, "apps/v1", "Deployment", router_name(owner.name), labels)
    return deployment | {
        "spec": {
            "replicas": plan.settings.replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": _PROGRESS_DEADLINE_S,
            "selector": {"matchLabels": router_selector(owner)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": _template(plan, labels, options),
        }
    }


def _template(plan: RouterPlan, labels: dict[str, str], options: RenderOptions) -> Manifest:
    template: Manifest = {"metadata": {"labels": labels}, "spec": _pod_spec(plan, options)}
    patch = plan.settings.pod_template
    if not patch:
        return template
    path = f"{plan.field}.podTemplate"
    return merge_pod_template(template, patch, container=CONTAINER, field=path)


def _pod_spec(plan: RouterPlan, options: RenderOptions) -> Manifest:
    owner = plan.owner
    spec: Manifest = {
        "serviceAccountName": router_name(owner.name),
        "automountServiceAccountToken": True,
        # Variables of a Service named kvoy would read as settings (KVOY_PORT).
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": (
            _drain_timeout_s(plan.settings, options) + _PRE_STOP_S + _EXIT_MARGIN_S
        ),
        "securityContext": restricted_pod(),
        "topologySpreadConstraints": spread_softly(router_selector(owner)),
        "containers": [_container(plan.settings, options)],
        "volumes": [
            {"name": _FLEET_VOLUME, "secret": {"secretName": fleet_secret_name(owner.name)}},
            *file_volumes(plan.settings),
            tmp_volume(),
        ],
    }
    if plan.pull_secrets:
        spec["imagePullSecrets"] = references(plan.pull_secrets)
    return spec


def _container(settings: RouterOptions, options: RenderOptions) -> Manifest:
    return {
        "name": CONTAINER,
        "image": options.router_image,
        "imagePullPolicy": options.image_pull_policy,
        "command": ["kvoy", "router"],
        "args": [
            "--host=0.0.0.0",
            f"--port={DEFAULT_ROUTER_PORT}",
            f"--admin-port={ROUTER_ADMIN_PORT}",
            "--kubernetes",
            f"--fleet-file={_FLEET_FOLDER}/{_FLEET_FILE}",
            f"--config={_FLEET_FOLDER}/{_CONFIG_FILE}",
            *file_arguments(settings),
            f"--drain-timeout-s={_drain_timeout_s(settings, options)}",
            "--log-format=json",
        ],
        "ports": [
            {"name": _API_PORT, "containerPort": DEFAULT_ROUTER_PORT, "protocol": "TCP"},
            {"name": _ADMIN_PORT, "containerPort": ROUTER_ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(settings, options),
        "securityContext": restricted_container(),
        "startupProbe": http_probe("/health", _ADMIN_PORT, period_s=1, failures=120, timeout_s=5),
        "livenessProbe": http_probe("/health", _ADMIN_PORT, period_s=10, failures=3, timeout_s=5),
        "readinessProbe": http_probe("/ready", _ADMIN_PORT, period_s=5, failures=2, timeout_s=5),
        "lifecycle": sleep_before_stop(_PRE_STOP_S),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": _FLEET_VOLUME, "mountPath": _FLEET_FOLDER, "readOnly": True},
            *file_mounts(settings),
            tmp_mount(),
        ],
    }


def _drain_timeout_s(settings: RouterOptions, options: RenderOptions) -> int:
    """As long as a request may take; not less where it is told to take less, since then a change of
    that rolls no router."""
    return max(options.router_drain_timeout_s, request_timeout_s(settings, options.router_defaults))


def _resources(settings: RouterOptions, options: RenderOptions) -> Manifest:
    """No limit of its own: a router that is killed cuts the streams of many."""
    own = {"cpu": options.router_cpu, "memory": options.router_memory}
    requests = {name: value for name, value in own.items() if name not in settings.resources.limits}
    resources = {
        "requests": {**requests, **settings.resources.requests},
        "limits": dict(settings.resources.limits),
    }
    return {name: values for name, values in resources.items() if values}


def _disruption_budget(owner: Owner) -> Manifest:
    """One router at a time may be evicted: a drain always goes on, and one is always left.

    A router that is not ready may always go, else it would hold its node for ever.
    """
    labels = child_labels(owner, ROUTER_COMPONENT)
    name = router_name(owner.name)
    budget = child(owner, "policy/v1", "PodDisruptionBudget", name, labels)
    return budget | {
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": router_selector(owner)},
        }
    }
