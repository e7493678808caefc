"""The operator's whole configuration; flags, environment and file come from it (see
contract.settings)."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml

from kvoy_contract.logs import FORMATS
from kvoy_contract.settings import setting
from kvoy_operator.errors import InvalidSpec
from kvoy_operator.options import RenderOptions
from kvoy_operator.resources import parse_router_defaults
from kvoy_operator.spec_router import RouterBehavior

_IMAGES = "localhost/kvoy"
_VERSION = version("kvoy")
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_ROLE_KINDS = ("ClusterRole", "Role")
MIN_RESYNC_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """Raises ValueError, naming the field, for a value that cannot work."""

    namespace: tuple[str, ...] = setting(
        (),
        help="namespace whose resources are served; repeatable. Without it all are, which takes a "
        "ClusterRole",
        metavar="NAME",
    )
    kubeconfig: str | None = setting(
        None,
        help="kubeconfig file; without it the pod's own service account, else KUBECONFIG or "
        "~/.kube/config",
        metavar="FILE",
    )
    operator_namespace: str | None = setting(
        None,
        help="where the operator's own Lease and master secret are; without it the pod's own "
        "namespace, outside of a cluster `default`",
        metavar="NAME",
    )
    lease_name: str = setting(
        "kvoy-operator", help="Lease by which several operators agree on one that acts"
    )
    master_secret_name: str = setting(
        "kvoy-operator-master",
        help="Secret in the operator's namespace from which each service's internal secret is "
        "derived; made when it is missing",
    )
    router_image: str = setting(
        f"{_IMAGES}/router:{_VERSION}", help="image of routers", metavar="IMAGE"
    )
    engine_image: str = setting(
        f"{_IMAGES}/engine:{_VERSION}-cpu",
        help="image of native engines without GPUs, and of jobs that fetch models",
        metavar="IMAGE",
    )
    engine_cuda_image: str = setting(
        f"{_IMAGES}/engine:{_VERSION}-cuda",
        help="image of native engines with GPUs",
        metavar="IMAGE",
    )
    sim_image: str = setting(
        f"{_IMAGES}/engine:{_VERSION}-sim", help="image of simulated engines", metavar="IMAGE"
    )
    image_pull_policy: str = setting(
        "IfNotPresent", help="imagePullPolicy of the images above", choices=_PULL_POLICIES
    )
    image_pull_secret: tuple[str, ...] = setting(
        (),
        help="name of a pull secret in each service's namespace, for the images above; repeatable",
        metavar="NAME",
    )
    router_role_kind: str = setting(
        "ClusterRole",
        help="kind of the role by which routers find pods; Role where the operator serves some "
        "namespaces only",
        choices=_ROLE_KINDS,
    )
    router_role_name: str = setting("kvoy-router", help="name of that role")
    network_policies: bool = setting(
        True, help="make NetworkPolicies: engines accept routers, and metrics are for --metrics-ns"
    )
    metrics_ns: tuple[str, ...] = setting(
        ("monitoring",),
        help="namespace whose pods may read metrics through the policies; repeatable",
        metavar="NAME",
    )
    router_defaults: str = setting(
        "{}",
        help="what holds for routers whose specs say nothing else: flowControl, failover and "
        "timeouts as in an LLMRouter's spec, in YAML or JSON",
        metavar="YAML",
    )
    host: str = setting("0.0.0.0", help="address of /metrics, /healthz and /readyz")
    port: int = setting(8080, help="port of /metrics, /healthz and /readyz")
    workers: int = setting(
        4,
        help="resources worked on at the same time where some take seconds; else it is one, by up "
        "to eight calls to the API server at once",
    )
    resync_s: float = setting(
        480.0,
        help="seconds, give or take a tenth, after which a resource is looked at without a cause, "
        "and the API server is asked for what watches have missed",
        metavar="SECONDS",
    )
    log_level: str = setting(
        "info", help="least severe log line", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting("text", help="form of log lines", choices=FORMATS)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers: {self.workers} is less than 1")
        if self.resync_s < MIN_RESYNC_S:
            raise ValueError(f"resync-s: {self.resync_s} is less than {MIN_RESYNC_S}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port: {self.port} is not a port")
        if len(set(self.namespace)) < len(self.namespace):
            raise ValueError("namespace: a name is given twice")
        _ = self.router_behavior

    @property
    def router_behavior(self) -> RouterBehavior:
        """What `router_defaults` says. Raises ValueError."""
        try:
            document = yaml.safe_load(self.router_defaults)
            if not isinstance(document, dict):
                raise ValueError("router-defaults: must map fields to values")
            return parse_router_defaults(document)
        except yaml.YAMLError as error:
            raise ValueError(f"router-defaults: not YAML: {error}") from None
        except InvalidSpec as error:
            raise ValueError(f"router-defaults: {error}") from None

    @property
    def own_namespace(self) -> str:
        """Of the Lease and the master secret."""
        if self.operator_namespace:
            return self.operator_namespace
        if _NAMESPACE_FILE.exists():
            return _NAMESPACE_FILE.read_text().strip()
        return "default"

    def render_options(self, master_secret: bytes) -> RenderOptions:
        return RenderOptions(
            router_image=self.router_image,
            engine_image=self.engine_image,
            engine_cuda_image=self.engine_cuda_image,
            sim_image=self.sim_image,
            master_secret=master_secret,
            image_pull_policy=self.image_pull_policy,  # type: ignore[arg-type] # among `choices`
            image_pull_secrets=self.image_pull_secret,
            router_role_kind=self.router_role_kind,  # type: ignore[arg-type] # among `choices`
            router_role_name=self.router_role_name,
            has_network_policies=self.network_policies,
            metrics_namespaces=self.metrics_ns,
            router_defaults=self.router_behavior,
        )


def own_identity() -> str:
    """Names this process among the operators: the pod's name, and the process, since a container
    that is started again has the name of the one before."""
    return f"{socket.gethostname()}_{os.getpid()}_{os.urandom(4).hex()}"
