"""kopf's session with the API server, from the same kubeconfig as the operator's own calls."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import aiohttp
import httpx2
import kopf
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SingleConfig

from kvoy_operator.watch_health import WatchHealth


async def kopf_session(config: SingleConfig, health: WatchHealth) -> kopf.AiohttpSession:
    """A session with fresh credentials, whose answers count as signs of life.

    kopf asks for another one after a 401. That is how a rotated token gets into
    watches: it is read from its file again.
    """
    assert config.user is not None  # `load_kubeconfig` refuses others
    tls = await asyncio.to_thread(
        client_adapter.verify_cluster, config.cluster, config.user, config.abs_file
    )
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
