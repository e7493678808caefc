"""The metrics APIs of a cluster, as metrics-server and an adapter of a Prometheus serve them.

Registered as APIServices, so that an autoscaler reaches them by the API server's aggregation layer
alone: only a client with the front proxy's certificate is answered. What is measured is a load that
the pods of a pool share evenly, however many there are.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit

from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.waiting import wait_for
from kvoy_contract.names import POOL_LABEL

Json = dict[str, Any]

_HOST: Final = "127.0.0.1"
_NAMESPACE, _NAME = "kube-system", "kvoy-test-metrics"
_APIS: Final = {
    "metrics.k8s.io": "v1beta1",
    "custom.metrics.k8s.io": "v1beta2",
    "external.metrics.k8s.io": "v1beta1",
}
_RESOURCES: Final = {
    "metrics.k8s.io": ("pods", "PodMetrics", ["get", "list"]),
    "custom.metrics.k8s.io": ("pods/*", "MetricValueList", ["get"]),
    "external.metrics.k8s.io": ("*", "ExternalMetricValueList", ["get"]),
}
_WINDOW_S: Final = 1
_APISERVICES: Final = "/apis/apiregistration.k8s.io/v1/apiservices"


class MetricsApi:
    """Serves from its making until `close`; `loads` may be changed from any thread."""

    def __init__(self, server: ApiServer) -> None:
        self.loads: dict[tuple[str, str, str], int] = {}
        """Thousandths of a unit by namespace, metric (`cpu`, or a name) and pool."""
        self._server = server
        self._http = _Server((_HOST, 0), self._answer, _tls(server))
        self._thread = threading.Thread(target=self._http.serve_forever, name="metrics APIs")
        self._thread.start()
        try:
            self._register(self._http.server_address[1])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for group, version in _APIS.items():
            path = f"{_APISERVICES}/{version}.{group}"
            if self._server.api.exists(path):
                self._server.api.request("DELETE", path)
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _register(self, port: int) -> None:
        spec = {"type": "ExternalName", "externalName": _HOST}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": _NAME}, "spec": spec}
        path = f"/api/v1/namespaces/{_NAMESPACE}/services/{_NAME}"
        self._server.api.apply(path, service)
        for group, version in _APIS.items():
            body = _api_service(group, version, port)
            self._server.api.apply(f"{_APISERVICES}/{version}.{group}", body)
        for group, version in _APIS.items():
            served = partial(self._server.api.get, f"/apis/{group}/{version}")
            wait_for(served, f"{group} served")

    def _answer(self, path: str, query: Mapping[str, list[str]]) -> Json | None:
        """None: there is nothing at this path."""
        selector = query.get("labelSelector", [""])[0]
        match unquote(path).strip("/").split("/"):
            case ["apis", group, version] if _APIS.get(group) == version:
                return _discovery(group, version)
            case ["apis", "metrics.k8s.io", "v1beta1", "namespaces", namespace, "pods"]:
                return self._cpu_use(namespace, selector)
            case ["apis", "custom.metrics.k8s.io", _, "namespaces", namespace, "pods", "*", metric]:
                return self._pods_values(namespace, metric, selector)
            case ["apis", "external.metrics.k8s.io", "v1beta1", "namespaces", namespace, metric]:
                return self._external_values(namespace, metric, selector)
        return None

    def _cpu_use(self, namespace: str, selector: str) -> Json:
        items = [
            {
                "metadata": {"name": pod["metadata"]["name"], "namespace": namespace},
                "timestamp": _now(),
                "window": f"{_WINDOW_S}s",
                "containers": [
                    {"name": each["name"], "usage": {"cpu": f"{share}m", "memory": "64Mi"}}
                    for each in pod["spec"]["containers"]
                ],
            }
            for pod, share in self._shares(namespace, "cpu", selector)
        ]
        return _list("metrics.k8s.io/v1beta1", "PodMetricsList", items)

    def _pods_values(self, namespace: str, metric: str, selector: str) -> Json:
        items = [
            {
                "describedObject": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "namespace": namespace,
                    "name": pod["metadata"]["name"],
                },
                "metric": {"name": metric},
                "timestamp": _now(),
                "windowSeconds": _WINDOW_S,
                "value": f"{share}m",
            }
            for pod, share in self._shares(namespace, metric, selector)
        ]
        return _list("custom.metrics.k8s.io/v1beta2", "MetricValueList", items)

    def _external_values(self, namespace: str, metric: str, selector: str) -> Json:
        items = [
            {
                "metricName": metric,
                "metricLabels": {"pool": pool},
                "timestamp": _now(),
                "value": f"{total}m",
            }
            for (of_namespace, of_metric, pool), total in self.loads.items()
            if (of_namespace, of_metric) == (namespace, metric) and selector == f"pool={pool}"
        ]
        return _list("external.metrics.k8s.io/v1beta1", "ExternalMetricValueList", items)

    def _shares(self, namespace: str, metric: str, selector: str) -> Iterator[tuple[Json, int]]:
        """Each selected pod that runs, with its part of its pool's load."""
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={quote(selector)}"
        pods = [
            pod
            for pod in self._server.api.get(path)["items"]
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        pools = [pod["metadata"]["labels"][POOL_LABEL] for pod in pods]
        for pod, pool in zip(pods, pools, strict=True):
            total = self.loads.get((namespace, metric, pool))
            if total is not None:
                yield pod, total // pools.count(pool)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], answer: Any, tls: ssl.SSLContext) -> None:
        super().__init__(address, _Handler)
        self.answer = answer
        self._tls = tls

    def finish_request(self, request: Any, client_address: Any) -> None:
        # In the request's own thread: a client that never ends its handshake holds up nobody.
        with self._tls.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        url = urlsplit(self.path)
        body = cast(_Server, self.server).answer(url.path, parse_qs(url.query))
        data = json.dumps(body or {"kind": "Status", "code": 404}).encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Autoscalers ask every second; the API server's log has what goes wrong."""


def _tls(server: ApiServer) -> ssl.SSLContext:
    folder = server.keys.write_server("metrics/api", [f"{_NAME}.{_NAMESPACE}.svc"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "api.crt", folder / "api.key")
    context.load_verify_locations(server.keys.folder / "front-proxy-ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _api_service(group: str, version: str, port: int) -> Json:
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{version}.{group}"},
        "spec": {
            "group": group,
            "version": version,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"namespace": _NAMESPACE, "name": _NAME, "port": port},
        },
    }


def _discovery(group: str, version: str) -> Json:
    name, kind, verbs = _RESOURCES[group]
    resource = {"name": name, "namespaced": True, "kind": kind, "verbs": verbs, "singularName": ""}
    return {
        "apiVersion": "v1",
        "kind": "APIResourceList",
        "groupVersion": f"{group}/{version}",
        "resources": [resource],
    }


def _list(api_version: str, kind: str, items: list[Json]) -> Json:
    return {"apiVersion": api_version, "kind": kind, "metadata": {}, "items": items}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
