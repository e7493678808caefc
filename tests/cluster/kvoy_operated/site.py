"""Two namespaces of a test, one for the operator and one for services, and a user with exactly the
operator's rights in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.waiting import wait_for
from kvoy_operated.kubelet import PretendedKubelet
from kvoy_operated.operator_process import OperatorProcess
from kvoy_operator.kinds import LLM_SERVICE, Kind, kind_of
from kvoy_operator.rbac import Rule, own_rules, router_rules, service_rules

_TIMEOUT_S = 240.0
"""Of whatever takes seconds on an idle machine."""
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_LEASE, _MASTER, _ROUTER_ROLE = "kvoy-operator", "kvoy-operator-master", "kvoy-router"


class Site:
    """`close` ends what it has started; namespaces stay."""

    def __init__(self, server: ApiServer, folder: Path, *, is_cluster_wide: bool = False) -> None:
        """With `is_cluster_wide` the operator serves all namespaces, by a ClusterRole."""
        self.server = server
        self.namespace = server.create_namespace()
        self.home = server.create_namespace()
        self.log = folder / "operator.log"
        self._is_cluster_wide = is_cluster_wide
        self.user = f"operator-of-{self.namespace}"
        """Who operators are to the API server."""
        self.kubeconfig = server.keys.write_kubeconfig(self.user, self.user)
        self._operators: list[OperatorProcess] = []
        self._kubelet: PretendedKubelet | None = None
        self._grant()

    def close(self) -> None:
        for operator in self._operators:
            operator.stop()
        if self._kubelet is not None:
            self._kubelet.stop()

    def start_operator(self, *arguments: str, module: str = "kvoy_cli") -> OperatorProcess:
        served = [] if self._is_cluster_wide else [f"--namespace={self.namespace}"]
        roles = [] if self._is_cluster_wide else ["--router-role-kind=Role"]
        operator = OperatorProcess(
            self.kubeconfig,
            self.log,
            [f"--operator-namespace={self.home}", *served, *roles, *arguments],
            module,
        )
        self._operators.append(operator)
        return operator

    def start_kubelet(self) -> PretendedKubelet:
        self._kubelet = PretendedKubelet(self.server.api, self.namespace)
        return self._kubelet

    def apply(self, name: str, kind: Kind = LLM_SERVICE, **spec: Any) -> dict[str, Any]:
        """Apply a custom resource as kubectl does."""
        if kind == LLM_SERVICE:
            spec = {"model": {"uri": "hf://Qwen/Qwen3-0.6B"}, **spec}
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        }
        made: dict[str, Any] = self.server.api.apply(kind.path(self.namespace, name), body)
        return made

    def get(self, kind: str, name: str) -> dict[str, Any]:
        body: dict[str, Any] = self.server.api.get(kind_of(kind).path(self.namespace, name))
        return body

    def all(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        query = f"?labelSelector={selector}" if selector else ""
        items: list[dict[str, Any]] = self.server.api.get(
            f"{kind_of(kind).path(self.namespace)}{query}"
        )["items"]
        return items

    def exists(self, kind: str, name: str) -> bool:
        return self.server.api.exists(kind_of(kind).path(self.namespace, name))

    def delete(self, kind: str, name: str, policy: str = "Background") -> None:
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy}
        self.server.api.request("DELETE", kind_of(kind).path(self.namespace, name), options)

    def condition(self, name: str, condition: str, kind: str = "LLMService") -> dict[str, Any]:
        """Empty: not there yet."""
        conditions = (self.get(kind, name).get("status") or {}).get("conditions") or ()
        return next((each for each in conditions if each["type"] == condition), {})

    def wait_for_condition(
        self,
        name: str,
        condition: str,
        status: str,
        reason: str | None = None,
        kind: str = "LLMService",
    ) -> dict[str, Any]:
        """The condition, once it is so for the present generation of the resource."""

        def check() -> dict[str, Any] | None:
            found = self.condition(name, condition, kind)
            is_current = (
                found.get("observedGeneration") == self.get(kind, name)["metadata"]["generation"]
            )
            fits = found.get("status") == status and reason in (None, found.get("reason"))
            return found if is_current and fits else None

        what = f"{kind} {name}: {condition}={status} {reason or ''}"
        found: dict[str, Any] = self._wait(check, what)
        return found

    def wait_until(self, check: Callable[[], Any], what: str, timeout_s: float = _TIMEOUT_S) -> Any:
        return self._wait(check, what, timeout_s)

    def wait_until_gone(self, kind: str, name: str) -> None:
        self._wait(lambda: not self.exists(kind, name), f"{kind} {name} gone")

    def _wait(self, check: Callable[[], Any], what: str, timeout_s: float = _TIMEOUT_S) -> Any:
        def ended() -> str | None:
            if self._operators and not any(each.is_running for each in self._operators):
                return f"no operator runs: {self.log.read_text()[-2000:]}"
            return None

        try:
            return wait_for(check, what, timeout_s, unless=ended)
        except TimeoutError as error:
            error.add_note(self.log.read_text()[-3000:] if self.log.exists() else "")
            raise

    def _grant(self) -> None:
        kind = "ClusterRole" if self._is_cluster_wide else "Role"
        rules = service_rules(kind, _ROUTER_ROLE)
        if self._is_cluster_wide:
            self._make_role(None, _ROUTER_ROLE, router_rules())
            self._make_role(None, self.user, rules)
            self._bind(None, self.user)
        else:
            self._make_role(self.namespace, _ROUTER_ROLE, router_rules())
            self._make_role(self.namespace, self.user, rules)
            self._bind(self.namespace, self.user)
        self._make_role(self.home, self.user, own_rules(_LEASE, _MASTER))
        self._bind(self.home, self.user)

    def _make_role(self, namespace: str | None, name: str, rules: list[Rule]) -> None:
        kind, path = _place("role", namespace)
        manifest = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": name},
            "rules": [rule.manifest() for rule in rules],
        }
        self.server.api.apply(f"{path}/{name}", manifest)

    def _bind(self, namespace: str | None, name: str) -> None:
        role, _ = _place("role", namespace)
        kind, path = _place("rolebinding", namespace)
        group = "rbac.authorization.k8s.io"
        manifest = {
            "apiVersion": f"{group}/v1",
            "kind": kind,
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": role, "name": name},
            "subjects": [{"apiGroup": group, "kind": "User", "name": self.user}],
        }
        self.server.api.apply(f"{path}/{name}", manifest)


def _place(plural: str, namespace: str | None) -> tuple[str, str]:
    """(kind, URL path) of a role or binding: in a namespace, or of the whole cluster."""
    name = {"role": "Role", "rolebinding": "RoleBinding"}[plural]
    if namespace is None:
        return f"Cluster{name}", f"{_RBAC}/cluster{plural}s"
    return name, f"{_RBAC}/namespaces/{namespace}/{plural}s"
