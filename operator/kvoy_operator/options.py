"""What rendering takes from the operator's own configuration, beside a user's spec. Pure.

Nothing here is a user's intent, so nothing here enters a revision: engines that run keep what they
were made with, and new ones take the present value.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Literal

from kvoy_operator.spec_router import RouterBehavior

RoleKind = Literal["ClusterRole", "Role"]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]


@dataclass(frozen=True, slots=True)
class RenderOptions:
    router_image: str
    engine_image: str
    """For the native engine on CPUs; also fetches models."""
    engine_cuda_image: str
    """For the native engine on GPUs."""
    sim_image: str
    """For simulated engines; has no torch."""
    master_secret: bytes
    """Every service's internal secret is derived from it: nothing has to be read back."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets in the namespaces of services, added to all pods."""
    router_role_kind: RoleKind = "ClusterRole"
    """`Role` where the operator is confined to namespaces; the chart makes one in each."""
    router_role_name: str = "kvoy-router"
    has_network_policies: bool = True
    metrics_namespaces: tuple[str, ...] = ("monitoring",)
    """Whose pods may reach metrics through the network policies."""
    router_drain_timeout_s: int = 600
    """How long a router that is replaced finishes its streams: as long as a request may take."""
    router_cpu: str = "250m"
    router_memory: str = "512Mi"
    """Requests of a router without `router.resources`: its prefix index takes most of it."""
    router_defaults: RouterBehavior = field(default_factory=RouterBehavior)
    """What holds for a router whose spec says nothing else."""

    def __post_init__(self) -> None:
        if len(self.master_secret) < 32:
            raise ValueError("master_secret has fewer than 32 bytes")


def service_secret(options: RenderOptions, namespace: str, name: str) -> str:
    """The internal secret of one service: 64 hex digits, the same at every rendering."""
    message = f"{namespace}/{name}".encode()
    return hmac.new(options.master_secret, message, hashlib.sha256).hexdigest()
