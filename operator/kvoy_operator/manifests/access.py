"""What routers and engines may do: the secret between them, and the routers' account. Pure."""

from __future__ import annotations

import base64
from typing import Final

from kvoy_contract.names import ENGINE_COMPONENT, ROUTER_COMPONENT
from kvoy_operator.identity import (
    Manifest,
    Owner,
    child,
    child_labels,
    internal_secret_name,
    router_name,
)
from kvoy_operator.manifests.parts import references
from kvoy_operator.options import RenderOptions, service_secret
from kvoy_operator.resources import LLMService

SECRET_KEY: Final = "secret"
_RBAC: Final = "rbac.authorization.k8s.io"


def opaque_secret(owner: Owner, name: str, component: str, values: dict[str, str]) -> Manifest:
    """`data`, not `stringData`: that is what the API server gives back, so it can be compared."""
    encoded = {key: base64.b64encode(text.encode()).decode() for key, text in values.items()}
    secret = child(owner, "v1", "Secret", name, child_labels(owner, component))
    return secret | {"type": "Opaque", "data": encoded}


def internal_secret(service: LLMService, options: RenderOptions) -> Manifest:
    """What only a router and the service's engines know."""
    secret = service_secret(options, service.namespace, service.name)
    name = internal_secret_name(service.name)
    return opaque_secret(service, name, ENGINE_COMPONENT, {SECRET_KEY: secret})


def router_account(owner: Owner, pull_secrets: tuple[str, ...]) -> Manifest:
    """A ServiceAccount that may find engines, and nothing else.

    Pods of an account of its own do not get the pull secrets of the namespace's `default` account.
    The router's image comes from where the operator's does, so the operator's pull secrets serve;
    copying those of another account would need a right to read accounts.
    """
    name = router_name(owner.name)
    labels = child_labels(owner, ROUTER_COMPONENT)
    account = child(owner, "v1", "ServiceAccount", name, labels)
    account["automountServiceAccountToken"] = False
    if pull_secrets:
        account["imagePullSecrets"] = references(pull_secrets)
    return account


def router_binding(owner: Owner, options: RenderOptions) -> Manifest:
    """Grants the router's role in the owner's namespace.

    A binding's role can never be changed, so each kind of role has a binding of its own name.
    """
    account = router_name(owner.name)
    name = account if options.router_role_kind == "ClusterRole" else f"{account}-local"
    binding = child(
        owner, f"{_RBAC}/v1", "RoleBinding", name, child_labels(owner, ROUTER_COMPONENT)
    )
    return binding | {
        "roleRef": {
            "apiGroup": _RBAC,
            "kind": options.router_role_kind,
            "name": options.router_role_name,
        },
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": owner.namespace}],
    }
