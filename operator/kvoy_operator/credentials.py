"""Who the operator is to the API server, for its own calls and for kopf's watches: TLS, tokens.

All of it from one kubeconfig, as lightkube reads it: a certificate, a token, a token's file, a
password, or what an exec plugin prints.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohttp
import httpx2
import kopf
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SingleConfig

from kvoy_operator.watch_health import WatchHealth


def tls_context(config: SingleConfig) -> ssl.SSLContext:
    """Raises OSError, SSLError where a certificate cannot be read."""
    assert config.user is not None  # `load_kubeconfig` refuses others
    return client_adapter.verify_cluster(config.cluster, config.user, config.abs_file)


class Credentials:
    """The header that says who calls; kept until the server no longer takes it."""

    def __init__(self, config: SingleConfig) -> None:
        self._config = config
        self._header: Mapping[str, str] | None = None
        self._lock = asyncio.Lock()

    async def header(self, instead_of: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """Empty with a client certificate. `instead_of` is one that was refused: of many calls
        that are, the first reads the token's file or runs the plugin again.

        Raises ConfigError.
        """
        async with self._lock:
            if self._header is None or self._header == instead_of:
                self._header = await _authorization(self._config)
            return self._header


async def kopf_session(config: SingleConfig, health: WatchHealth) -> kopf.AiohttpSession:
    """A session with fresh credentials, whose answers count as signs of life.

    kopf asks for another one after a 401. That is how a rotated token gets into
    watches: it is read from its file again.
    """
    tls = await asyncio.to_thread(tls_context, config)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls),
        headers=await _authorization(config),
        trace_configs=[health.trace(urlsplit(config.cluster.server).path.rstrip("/"))],
    )
    return kopf.AiohttpSession(
        server=config.cluster.server,
        default_namespace=config.namespace,
        aiohttp_session=session,
    )


async def _authorization(config: SingleConfig) -> dict[str, str]:
    """The header that lightkube would send: a token, a password, what an exec plugin prints."""
    auth = client_adapter.user_auth(config.user)
    if auth is None:
        return {}  # a client certificate, which is part of the TLS context
    request = httpx2.Request("GET", config.cluster.server)
    flow = auth.async_auth_flow(request)
    try:
        authorised = await anext(flow)
    finally:
        await flow.aclose()
    return {"Authorization": authorised.headers["Authorization"]}
