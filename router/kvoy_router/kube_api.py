"""The few calls that a router makes to the Kubernetes API: list and watch pods, look at an owner.

Configuration and credentials are lightkube's: the service account inside a cluster (its token is
read again when the API refuses the old one), the kubeconfig outside. The calls are our own for
bookmarks, for deadlines on silent connections, and to decode no more than is needed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

import httpx2
import msgspec
import yaml
from lightkube.config.client_adapter import user_auth, verify_cluster
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from kvoy_router.errors import KubeError, NoClusterError
from kvoy_router.kube_objects import (
    AnyObject,
    ObjectMeta,
    OwnerReference,
    PodList,
    Status,
    WatchEvent,
)

T = TypeVar("T")

NOT_FOUND = 404

_PAGE = 500
_CALL_TIMEOUT_S = 10.0
_SILENCE_S = 90.0
"""A watch gets a bookmark each minute, whatever happens: one that is silent for longer is dead."""
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_PLURALS = {
    ("apps", "ReplicaSet"): "replicasets",
    ("apps", "Deployment"): "deployments",
    ("apps", "StatefulSet"): "statefulsets",
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): "leaderworkersets",
}
# What an owner reference says was written by whoever made the pod: it becomes part of a path.
_VERSION = re.compile(r"v[0-9][0-9a-z]{0,30}")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def load_config() -> SingleConfig:
    """The service account's inside a cluster, else that of KUBECONFIG. Raises NoClusterError."""
    try:
        config = KubeConfig.from_env().get()
    except (ConfigError, OSError, KeyError, ValueError, TypeError, yaml.YAMLError) as error:
        raise NoClusterError(f"no configuration of a cluster: {error}") from None
    if config is None:
        raise NoClusterError("the configuration names no cluster")
    return config


@contextlib.asynccontextmanager
async def open_api(config: SingleConfig) -> AsyncIterator[KubeApi]:
    """Connections and credentials made anew: certificates may have been replaced.

    Raises KubeError.
    """
    with _as_kube_errors():
        verify = verify_cluster(config.cluster, config.user, config.abs_file)  # type: ignore[arg-type]
        client = httpx2.AsyncClient(
            base_url=config.cluster.server,
            auth=user_auth(config.user),
            transport=httpx2.AsyncHTTPTransport(verify=verify),
            timeout=_CALL_TIMEOUT_S,
        )
    async with client:
        yield KubeApi(client)


class KubeApi:
    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def list_pods(self, namespace: str, selector: str) -> PodList:
        """All of them, as they are now. Raises KubeError."""
        params: dict[str, str] = {"labelSelector": selector, "limit": str(_PAGE)}
        pods = None
        while True:
            page = await self._get(f"/api/v1/namespaces/{namespace}/pods", PodList, params)
            if pods is None:
                pods = page
            else:
                pods.items.extend(page.items)
            if not page.metadata.next_page:
                return pods
            params["continue"] = page.metadata.next_page

    @contextlib.asynccontextmanager
    async def watching_pods(
        self, namespace: str, selector: str, version: str, timeout_s: int
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """What has changed since `version`; the server ends the stream after `timeout_s`.

        Raises KubeError, also while events are read; `version` may be too old.
        """
        params = {
            "labelSelector": selector,
            "resourceVersion": version,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(timeout_s),
        }
        timeout = httpx2.Timeout(_CALL_TIMEOUT_S, read=_SILENCE_S)
        path = f"/api/v1/namespaces/{namespace}/pods"
        with _as_kube_errors():
            async with self._client.stream("GET", path, params=params, timeout=timeout) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                yield _events(response)

    async def get_owner(self, namespace: str, owner: OwnerReference) -> ObjectMeta | None:
        """None when it does not exist, or cannot be one of those kinds. Raises KubeError."""
        plural = _PLURALS.get((owner.group, owner.kind))
        version = owner.api_version.rpartition("/")[2]
        if plural is None or not _VERSION.fullmatch(version) or not _NAME.fullmatch(owner.name):
            return None
        path = f"/apis/{owner.group}/{version}/namespaces/{namespace}/{plural}/{owner.name}"
        try:
            return (await self._get(path, AnyObject, {}, accept=_METADATA_ONLY)).metadata
        except KubeError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def _get(
        self, path: str, result: type[T], params: dict[str, str], accept: str = "application/json"
    ) -> T:
        with _as_kube_errors():
            response = await self._client.get(path, params=params, headers={"accept": accept})
            if response.status_code != 200:
                raise _refusal(response.status_code, response.content)
            return msgspec.json.decode(response.content, type=result)


async def _events(response: httpx2.Response) -> AsyncIterator[WatchEvent]:
    async for line in response.aiter_lines():
        event = msgspec.json.decode(line, type=WatchEvent)
        if event.type == "ERROR":
            raise _refusal(0, bytes(event.object))
        yield event


@contextlib.contextmanager
def _as_kube_errors() -> Iterator[None]:
    try:
        yield
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ConfigError) as error:
        raise KubeError(str(error) or type(error).__name__) from error
    except msgspec.MsgspecError as error:
        raise KubeError(f"the API's answer is not understood: {error}") from error


def _refusal(status: int, body: bytes) -> KubeError:
    try:
        told = msgspec.json.decode(body, type=Status)
    except msgspec.MsgspecError:
        told = Status()
    status = status or told.code
    return KubeError(told.message or f"the API answered with status {status}", status)
