"""The kinds of objects that the operator watches or writes, and where the API has them."""

from __future__ import annotations

from typing import NamedTuple

from kvoy_contract.names import API_GROUP, API_VERSION, MANAGED_BY, MANAGED_BY_LABEL


class Kind(NamedTuple):
    name: str
    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def is_ours(self) -> bool:
        """Whether it is one of Kvoy's own custom resources."""
        return self.group == API_GROUP

    @property
    def label_selector(self) -> str:
        """What the server filters by before it sends us anything: only custom resources are seen
        whoever made them."""
        return "" if self.is_ours else f"{MANAGED_BY_LABEL}={MANAGED_BY}"

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """URL path of an object, or of the collection without `name`; None: of all namespaces."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(parts)


LLM_SERVICE = Kind("LLMService", API_GROUP, API_VERSION, "llmservices")
LLM_ROUTER = Kind("LLMRouter", API_GROUP, API_VERSION, "llmrouters")
LLM_ROLE_SCALER = Kind("LLMRoleScaler", API_GROUP, API_VERSION, "llmrolescalers")
DEPLOYMENT = Kind("Deployment", "apps", "v1", "deployments")
LEADER_WORKER_SET = Kind("LeaderWorkerSet", "leaderworkerset.x-k8s.io", "v1", "leaderworkersets")
POD = Kind("Pod", "", "v1", "pods")
SERVICE = Kind("Service", "", "v1", "services")
SERVICE_ACCOUNT = Kind("ServiceAccount", "", "v1", "serviceaccounts")
SECRET = Kind("Secret", "", "v1", "secrets")
EVENT = Kind("Event", "events.k8s.io", "v1", "events")
PERSISTENT_VOLUME_CLAIM = Kind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims")
JOB = Kind("Job", "batch", "v1", "jobs")
POD_DISRUPTION_BUDGET = Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets")
NETWORK_POLICY = Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies")
ROLE_BINDING = Kind("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings")
LEASE = Kind("Lease", "coordination.k8s.io", "v1", "leases")

CUSTOM = (LLM_SERVICE, LLM_ROUTER, LLM_ROLE_SCALER)
"""What users write, and what must be there before anything is watched."""
WATCHED = (
    *CUSTOM,
    DEPLOYMENT,
    POD,
    SERVICE,
    SERVICE_ACCOUNT,
    PERSISTENT_VOLUME_CLAIM,
    JOB,
    POD_DISRUPTION_BUDGET,
    NETWORK_POLICY,
    ROLE_BINDING,
)
"""What every cluster has. Secrets are missing on purpose: the operator may not read them."""
OPTIONAL = (LEADER_WORKER_SET,)
"""Watched as soon as the cluster knows them."""

BY_NAME = {kind.name: kind for kind in (*WATCHED, *OPTIONAL, SECRET, EVENT, LEASE)}


def kind_of(name: str) -> Kind:
    """Raises KeyError for a kind that the operator neither watches nor writes."""
    return BY_NAME[name]
