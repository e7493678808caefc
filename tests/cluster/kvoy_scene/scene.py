"""Services, workloads and pods for a router on a real API server that runs no pods.

Real controllers make the pods of real Deployments; a test gives each pod an address of loopback,
where a fake engine listens, as a kubelet would."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from kvoy_cluster.api import MERGE_PATCH, ApiError
from kvoy_cluster.api_server import ApiServer
from kvoy_contract.fleet import Fleet, FleetService, render_fleet
from kvoy_contract.testing import FakeEngine
from kvoy_contract.testing_ports import free_port
from kvoy_router.app import Router
from kvoy_router.config import RouterConfig
from kvoy_router.testing import eventually, is_routable

StartEngine = Callable[..., Awaitable[FakeEngine]]

MODEL = "m"
NODE = "nowhere"
"""Pods that are bound to a node end only when its kubelet says so, and there is none."""
WAIT_S = 90.0
_SERVICE_KIND = {"apiVersion": "kvoy.dev/v1alpha1", "kind": "LLMService"}

RULES = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    {
        "apiGroups": ["apps"],
        "resources": ["replicasets", "deployments", "statefulsets"],
        "verbs": ["get"],
    },
    {
        "apiGroups": ["leaderworkerset.x-k8s.io"],
        "resources": ["leaderworkersets"],
        "verbs": ["get"],
    },
]
"""All that a router may do."""

_addresses = (f"127.0.{high}.{low}" for high, low in itertools.product(range(1, 99), range(1, 250)))


_HANDSHAKE_S = 0.5
"""Of a connection to the API that may just have begun."""


class Scene:
    """One namespace with a router's account, services, and their workloads."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server = server
        self.namespace = server.create_namespace()
        self.fleet_file = folder / "fleet.yaml"
        self.kubeconfig = folder / "kubeconfig"
        self.token_file = folder / "token"
        self.http_port = free_port(offsets=(0, 1))
        """Of all engines here, each at an address of its own; telemetry is at the next one."""
        self._services: list[FleetService] = []
        self._make_account()

    def path(self, kind: str, name: str = "", api: str = "api/v1") -> str:
        return f"/{api}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def create(self, kind: str, body: dict[str, Any], api: str = "api/v1") -> dict[str, Any]:
        made: dict[str, Any] = self.server.api.request("POST", self.path(kind, api=api), body)
        return made

    def _make_account(self) -> None:
        rbac = "apis/rbac.authorization.k8s.io/v1"
        self.create("serviceaccounts", {"metadata": {"name": "router"}})
        self.create("roles", {"metadata": {"name": "kvoy-router"}, "rules": RULES}, rbac)
        subject = {"kind": "ServiceAccount", "name": "router", "namespace": self.namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "kvoy-router"}
        binding = {"metadata": {"name": "router"}, "subjects": [subject], "roleRef": role}
        self.create("rolebindings", binding, rbac)
        self.token_file.write_text(self.make_token())
        config = json.loads(self.server.kubeconfig.read_text())
        config["users"][0]["user"] = {"tokenFile": str(self.token_file)}
        config["contexts"][0]["context"]["namespace"] = self.namespace
        self.kubeconfig.write_text(json.dumps(config))

    def make_token(self, bound_to_secret: str = "") -> str:
        """Of the router's account; one that is bound ends with its Secret."""
        spec: dict[str, Any] = {"expirationSeconds": 3600}
        if bound_to_secret:
            uid = self.create("secrets", {"metadata": {"name": bound_to_secret}})["metadata"]["uid"]
            names = {"apiVersion": "v1", "kind": "Secret", "name": bound_to_secret, "uid": uid}
            spec["boundObjectRef"] = names
        token: str = self.create("serviceaccounts/router/token", {"spec": spec})["status"]["token"]
        return token

    def reach_api_at(self, port: int) -> None:
        config = json.loads(self.kubeconfig.read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
        self.kubeconfig.write_text(json.dumps(config))

    def add_service(self, name: str, **fields: Any) -> FleetService:
        """The custom resource, and its line in the fleet file."""
        spec = {"model": {"uri": "file:///m"}, "engine": {"kind": "sim"}}
        body = {**_SERVICE_KIND, "metadata": {"name": name}, "spec": spec}
        uid = self.create("llmservices", body, "apis/kvoy.dev/v1alpha1")["metadata"]["uid"]
        settings = {"model": MODEL, "secret": f"secret-of-{name}"} | fields
        service = FleetService(name=name, uid=uid, **settings)
        self._services.append(service)
        self.write_fleet(*self._services)
        return service

    def write_fleet(self, *services: FleetService) -> None:
        self.fleet_file.write_text(render_fleet(Fleet(services=services)))

    def owner(self, service: FleetService) -> dict[str, Any]:
        names = {"name": service.name, "uid": service.uid}
        return {**_SERVICE_KIND, **names, "controller": True, "blockOwnerDeletion": True}

    def labels(self, service: str, **labels: str) -> dict[str, str]:
        usual = {"kvoy.dev/component": "engine", "kvoy.dev/service": service}
        return usual | {f"kvoy.dev/{key}": value for key, value in labels.items()}

    def pod_spec(self) -> dict[str, Any]:
        ports = [
            {"name": "http", "containerPort": self.http_port},
            {"name": "telemetry", "containerPort": self.http_port + 1},
        ]
        container = {"name": "engine", "image": "localhost/none:1", "ports": ports}
        return {"nodeName": NODE, "containers": [container]}

    def deploy(
        self,
        name: str,
        service: FleetService | None,
        replicas: int = 1,
        *,
        pool: str = "serving",
        revision: str = "r1",
        claims: str = "",
    ) -> None:
        """A Deployment of the service's engines; without one, of a stranger who `claims` to be."""
        owners = [self.owner(service)] if service else []
        labels = self.labels(service.name if service else claims, pool=pool, revision=revision)
        labels["app"] = name
        body = {
            "metadata": {"name": name, "ownerReferences": owners},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": name}},
                "template": {"metadata": {"labels": labels}, "spec": self.pod_spec()},
            },
        }
        self.create("deployments", body, "apis/apps/v1")

    def scale(self, name: str, replicas: int) -> None:
        self.server.api.request(
            "PATCH",
            self.path("deployments", name, "apis/apps/v1"),
            {"spec": {"replicas": replicas}},
            MERGE_PATCH,
        )

    def pods(self, app: str = "") -> list[dict[str, Any]]:
        query = f"?labelSelector=app={app}" if app else ""
        items: list[dict[str, Any]] = self.server.api.get(self.path("pods") + query)["items"]
        return sorted(items, key=lambda pod: pod["metadata"]["name"])

    async def pods_of(self, app: str, count: int) -> list[dict[str, Any]]:
        await eventually(lambda: len(self.pods(app)) == count, WAIT_S)
        return self.pods(app)

    async def until_made(self, deployment: str, count: int) -> None:
        """Wait until its controllers have seen all of its pods: they make and remove none now."""

        def are_made() -> bool:
            status = self.server.api.get(self.path("deployments", deployment, "apis/apps/v1"))[
                "status"
            ]
            return bool(status.get("replicas") == count)

        await eventually(are_made, WAIT_S)

    def give_address(self, pod: str, ip: str = "") -> str:
        """Let it run, at a free address of loopback unless told."""
        ip = ip or next(_addresses)
        self._set_status(pod, {"podIP": ip, "podIPs": [{"ip": ip}], "phase": "Running"})
        return ip

    def end_pod(self, pod: str) -> None:
        """Nothing happens if its controller has removed it meanwhile."""
        try:
            self._set_status(pod, {"phase": "Failed"})
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    def _set_status(self, pod: str, status: dict[str, Any]) -> None:
        path = self.path("pods", pod) + "/status"
        self.server.api.request("PATCH", path, {"status": status}, MERGE_PATCH)

    def delete_pod(self, pod: str, *, at_once: bool = False) -> None:
        query = "?gracePeriodSeconds=0" if at_once else ""
        self.server.api.request("DELETE", self.path("pods", pod) + query)

    async def start_engines(
        self, start: StartEngine, app: str, service: FleetService, count: int, **options: Any
    ) -> dict[str, FakeEngine]:
        """An engine for each pod of a Deployment, by the pod's name."""
        engines = {}
        for pod in await self.pods_of(app, count):
            name = pod["metadata"]["name"]
            options = {"secret": service.secret, "model": service.model} | options
            engines[name] = await start(host=next(_addresses), **self.ports, **options)
            self.give_address(name, engines[name].host)
        return engines

    @property
    def ports(self) -> dict[str, int]:
        return {"port": self.http_port, "telemetry_port": self.http_port + 1}

    @contextlib.asynccontextmanager
    async def router(self, **settings: Any) -> AsyncIterator[Router]:
        defaults: dict[str, Any] = {
            "kubernetes": True,
            "fleet_file": str(self.fleet_file),
            "port": 0,
            "drain_timeout_s": 5.0,
            "policy": "round-robin",
            # What nobody can serve is refused at once.
            "max_held_s": 0.0,
        }
        router = Router(RouterConfig(**defaults | settings))
        async with router.serving():
            try:
                yield router
            finally:
                # uvloop loses a connection whose TLS handshake is cancelled, and cannot close then.
                await asyncio.sleep(_HANDSHAKE_S)


def names(router: Router) -> set[str]:
    return {endpoint.name for endpoint in router.pool.endpoints}


async def routable(router: Router, *engines: FakeEngine) -> None:
    await eventually(lambda: all(is_routable(router.pool, e.address) for e in engines), WAIT_S)


async def call(router: Router, method: str, path: str, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.server.port}") as client:
        return await client.request(method, path, **options)


async def ask(router: Router, text: str = "hi", model: str = MODEL) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return await call(router, "POST", "/v1/chat/completions", json=body)
