"""Who a pod belongs to, as the API tells it and not as the pod's labels claim.

    pod → ReplicaSet → Deployment → LLMService
    pod → StatefulSet → LeaderWorkerSet → LLMService

Each link is the controller's owner reference, and the object that it names must be there under the
very uid that it names: a namesake is a stranger."""

from __future__ import annotations

from kvoy_contract.names import API_GROUP
from kvoy_router.kube_api import KubeApi
from kvoy_router.kube_objects import OwnerReference

SERVICE_KIND = (API_GROUP, "LLMService")
OWNER_OF = {
    ("apps", "ReplicaSet"): ("apps", "Deployment"),
    ("apps", "Deployment"): SERVICE_KIND,
    ("apps", "StatefulSet"): ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"),
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): SERVICE_KIND,
}
POD_CONTROLLERS = frozenset({("apps", "ReplicaSet"), ("apps", "StatefulSet")})


def may_lead_to_service(controller: OwnerReference | None) -> bool:
    """Whether a pod's controller can be the beginning of a chain; no call to the API is made."""
    return controller is not None and (controller.group, controller.kind) in POD_CONTROLLERS


async def service_uid(api: KubeApi, namespace: str, controller: OwnerReference) -> str | None:
    """The uid of the service at the chain's end; None when the chain ends elsewhere.

    Raises KubeError, which says nothing about the chain.
    """
    link = controller
    while True:
        wanted = OWNER_OF.get((link.group, link.kind))
        if wanted is None:
            return None
        owner = await api.get_owner(namespace, link)
        if owner is None or owner.uid != link.uid or owner.controller is None:
            return None
        link = owner.controller
        if (link.group, link.kind) != wanted:
            return None
        if wanted == SERVICE_KIND:
            return link.uid
