"""What the operator may do, as data: the chart's roles are held equal to it by a test.

Without wildcards, and only what some call really makes. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvoy_operator.kinds import (
    CUSTOM,
    DEPLOYMENT,
    EVENT,
    JOB,
    LEADER_WORKER_SET,
    LEASE,
    LLM_ROLE_SCALER,
    LLM_ROUTER,
    LLM_SERVICE,
    NETWORK_POLICY,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    POD_DISRUPTION_BUDGET,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)


class Rule(NamedTuple):
    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()

    def manifest(self) -> dict[str, Any]:
        """As an entry of a Role's `rules`."""
        rule: dict[str, Any] = {
            "apiGroups": [self.group],
            "resources": list(self.resources),
            "verbs": list(self.verbs),
        }
        if self.names:
            rule["resourceNames"] = list(self.names)
        return rule


_WATCH = ("get", "list", "watch")
# Server-side apply of an object that is not there takes `create` beside `patch`.
_MANAGE = ("get", "list", "watch", "create", "patch", "delete")


def _rules(verbs: Sequence[str], *kinds: Kind) -> list[Rule]:
    """One rule for each API group among the kinds."""
    groups = dict.fromkeys(kind.group for kind in kinds)
    return [
        Rule(group, tuple(kind.plural for kind in kinds if kind.group == group), tuple(verbs))
        for group in groups
    ]


def service_rules(router_role_kind: str, router_role_name: str) -> list[Rule]:
    """Wherever services are: a ClusterRole, or a Role in each served namespace."""
    role_plural = "clusterroles" if router_role_kind == "ClusterRole" else "roles"
    return [
        *_rules(_WATCH, LLM_SERVICE, LLM_ROUTER, POD),
        *_rules(_MANAGE, LLM_ROLE_SCALER),
        Rule(LLM_SERVICE.group, tuple(f"{kind.plural}/status" for kind in CUSTOM), ("patch",)),
        # An owner reference that blocks its owner's deletion takes this where the admission plugin
        # OwnerReferencesPermissionEnforcement is on, as on OpenShift.
        Rule(
            LLM_SERVICE.group,
            tuple(f"{kind.plural}/finalizers" for kind in (LLM_SERVICE, LLM_ROUTER)),
            ("update",),
        ),
        *_rules(
            _MANAGE,
            DEPLOYMENT,
            LEADER_WORKER_SET,
            SERVICE,
            SERVICE_ACCOUNT,
            PERSISTENT_VOLUME_CLAIM,
            JOB,
            POD_DISRUPTION_BUDGET,
            NETWORK_POLICY,
            ROLE_BINDING,
        ),
        # Never read: what is in them is derived, and a stranger's stays a secret.
        *_rules(("create", "patch", "delete"), SECRET),
        # What is stuck says why in Events alone.
        *_rules(("create", "list"), EVENT),
        # To bind a role takes having its rights or this; it is for routers' accounts.
        Rule(ROLE_BINDING.group, (role_plural,), ("bind",), (router_role_name,)),
    ]


def own_rules(lease_name: str, master_secret_name: str) -> list[Rule]:
    """In the operator's own namespace: always a Role. What is created has no name yet to RBAC."""
    return [
        Rule(LEASE.group, (LEASE.plural,), ("create",)),
        Rule(LEASE.group, (LEASE.plural,), ("get", "update"), (lease_name,)),
        Rule(SECRET.group, (SECRET.plural,), ("create",)),
        Rule(SECRET.group, (SECRET.plural,), ("get",), (master_secret_name,)),
    ]


def router_rules() -> list[Rule]:
    """Of a router's account, in its own namespace: to find engines and to see whose they are."""
    return [
        Rule(POD.group, (POD.plural,), ("list", "watch")),
        Rule(DEPLOYMENT.group, ("replicasets", DEPLOYMENT.plural, "statefulsets"), ("get",)),
        Rule(LEADER_WORKER_SET.group, (LEADER_WORKER_SET.plural,), ("get",)),
    ]
