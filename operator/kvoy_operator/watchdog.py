"""`/metrics`, `/healthz` and `/readyz`: whether the operator still does its work.

An event loop that does not turn cannot answer, which is the first check of `/healthz`; the second
is that every watch has had a sign of life.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from kvoy_operator.metrics import Metrics
from kvoy_operator.watch_health import WatchHealth


def build_app(
    metrics: Metrics, health: WatchHealth, is_ready: Callable[[], bool]
) -> web.Application:
    """`is_ready`: the watches have started, whether or not this operator leads."""

    async def serve_metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def serve_health(_: web.Request) -> web.Response:
        stalled = health.stalled()
        if stalled:
            return web.Response(status=503, text=f"no sign of life from: {', '.join(stalled)}\n")
        return web.Response(text="ok\n")

    async def serve_ready(_: web.Request) -> web.Response:
        if not is_ready():
            return web.Response(status=503, text="waits for Kvoy's custom resources\n")
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/metrics", serve_metrics)
    app.router.add_get("/healthz", serve_health)
    app.router.add_get("/readyz", serve_ready)
    return app


async def serve(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Listen; the caller cleans the runner up. Raises OSError when the port is taken."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner
