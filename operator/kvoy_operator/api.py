"""HTTP to the API server: one request, its answer as plain data or one typed failure.

lightkube reads the kubeconfig or the pod's own service account and keeps credentials fresh (a
rotated token, an exec plugin). Above it are paths and bodies, so that a dry run, a precondition, a
Retry-After or a partial list is what the API documents and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx2
import msgspec
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from kvoy_operator.api_errors import ApiRefusal, ApiUnreachable

APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON = "application/json"
PARTIAL_OBJECT = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
PARTIAL_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

REQUEST_TIMEOUT_S = 30.0
"""Admission webhooks may take ten seconds each."""
_LIMITS = httpx2.Limits(max_connections=100, max_keepalive_connections=40, keepalive_expiry=30.0)
"""As many as all workers use at once are kept: a new one costs more than a call."""

Observer = Callable[[str, str, int], None]
"""Told of each call: HTTP method, URL path, status (0: no answer)."""


def load_kubeconfig(path: str | None) -> SingleConfig:
    """The pod's own account inside a cluster, else KUBECONFIG or ~/.kube/config; `path` wins.

    Raises lightkube's ConfigError with what is missing.
    """
    config = KubeConfig.from_file(path) if path else KubeConfig.from_env()
    chosen = config.get()
    if chosen is None or chosen.user is None:
        raise ConfigError("the kubeconfig's context names no user")
    return chosen


class Api:
    def __init__(self, config: SingleConfig, observe: Observer = lambda *_: None) -> None:
        params = client_adapter.ConnectionParams(timeout=httpx2.Timeout(REQUEST_TIMEOUT_S))
        self._http = httpx2.AsyncClient(**params.httpx_params(config), limits=_LIMITS)
        self._observe = observe

    async def close(self) -> None:
        await self._http.aclose()

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        timeout_s: float | None = None,
    ) -> Any:
        """Plain data of the answer. Raises ApiRefusal, ApiUnreachable."""
        return msgspec.json.decode(
            await self.raw(
                method,
                path,
                params=params,
                body=body,
                content_type=content_type,
                timeout_s=timeout_s,
            )
        )

    async def raw(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
        timeout_s: float | None = None,
    ) -> bytes:
        """Like `request`, but the answer's bytes, for who decodes only a part of them."""
        headers = {"accept": accept}
        if body is not None:
            headers["content-type"] = content_type
        timeout = httpx2.USE_CLIENT_DEFAULT if timeout_s is None else httpx2.Timeout(timeout_s)
        try:
            response = await self._http.request(
                method,
                path,
                params=dict(params or {}),
                content=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=timeout,
            )
        except (httpx2.HTTPError, OSError) as error:
            self._observe(method, path, 0)
            raise ApiUnreachable(f"{method} {path}: {type(error).__name__}: {error}") from error
        self._observe(method, path, response.status_code)
        if response.status_code >= 400:
            raise _refusal(response)
        return response.content


def _refusal(response: httpx2.Response) -> ApiRefusal:
    try:
        status = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        # Not the API server's own words: a proxy before it, or a plain-text 429.
        status = {"message": response.text[:300]}
    if not isinstance(status, dict):
        status = {"message": response.text[:300]}
    return ApiRefusal.from_status(response.status_code, status, _retry_after_s(response))


def _retry_after_s(response: httpx2.Response) -> float | None:
    try:
        return float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return None
