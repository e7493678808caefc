"""HTTP to the API server: one request, its answer as plain data or one typed failure.

lightkube reads the kubeconfig or the pod's own service account (see `credentials`). Above it are
paths and bodies, so that a dry run, a precondition, a Retry-After or a partial list is what the API
documents and nothing else. aiohttp sends them, at a third of what httpx takes for a call: with a
thousand services that is most of the operator's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from kvoy_operator.api_errors import ApiRefusal, ApiUnreachable
from kvoy_operator.credentials import Credentials, tls_context

APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON = "application/json"
PARTIAL_OBJECT = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
PARTIAL_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

REQUEST_TIMEOUT_S = 30.0
"""Admission webhooks may take ten seconds each."""
_MAX_CONNECTIONS = 100
_KEEP_ALIVE_S = 30.0
"""As many as all workers use at once are kept: a new one costs more than a call."""
_MAX_PLAIN_BYTES = 300
"""Of an answer that is no `Status`."""

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
        """Raises ConfigError, OSError where a certificate cannot be read."""
        self._server = config.cluster.server.rstrip("/")
        self._tls = tls_context(config)
        self._credentials = Credentials(config)
        self._observe = observe
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

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
        data = None if body is None else msgspec.json.encode(body)
        try:
            authorization = await self._credentials.header()
            status, said, answer = await self._send(
                method, path, params, data, {**headers, **authorization}, timeout_s
            )
            if status == 401 and authorization:
                # The token has been rotated, or has expired.
                authorization = await self._credentials.header(instead_of=authorization)
                status, said, answer = await self._send(
                    method, path, params, data, {**headers, **authorization}, timeout_s
                )
        except (aiohttp.ClientError, OSError, ConfigError) as error:  # a TimeoutError is an OSError
            self._observe(method, path, 0)
            raise ApiUnreachable(f"{method} {path}: {type(error).__name__}: {error}") from error
        self._observe(method, path, status)
        if status >= 400:
            raise _refusal(status, said, answer)
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        data: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float | None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the answer."""
        timeout = aiohttp.ClientTimeout(REQUEST_TIMEOUT_S if timeout_s is None else timeout_s)
        async with self._open().request(
            method,
            f"{self._server}{path}",
            params=params,
            data=data,
            headers=headers,
            timeout=timeout,
        ) as response:
            return response.status, response.headers, await response.read()

    def _open(self) -> aiohttp.ClientSession:
        """The session, which belongs to the loop of the first call."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=_MAX_CONNECTIONS, keepalive_timeout=_KEEP_ALIVE_S, ssl=self._tls
            )
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


def _refusal(code: int, headers: Mapping[str, str], answer: bytes) -> ApiRefusal:
    try:
        status = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        status = None
    if not isinstance(status, dict):
        # Not the API server's own words: a proxy before it, or a plain-text 429.
        status = {"message": answer[:_MAX_PLAIN_BYTES].decode(errors="replace")}
    return ApiRefusal.from_status(code, status, _retry_after_s(headers))


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    try:
        return float(headers["retry-after"])
    except (KeyError, ValueError):
        return None
