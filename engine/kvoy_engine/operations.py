"""The routes for operators and for listing models: health, readiness, metrics, version,
`/v1/models`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from kvoy_contract.errors import ApiError, MethodNotAllowed, NotFound
from kvoy_engine.health import Phase, Readiness
from kvoy_engine.metrics import CONTENT_TYPE, EngineMetrics
from kvoy_engine.service import TextService


def create_operations_app(
    readiness: Readiness,
    metrics: EngineMetrics,
    problem: Callable[[], str | None],
    is_ready: Callable[[], bool],
    service: Callable[[], TextService],
) -> FastAPI:
    """`problem` says what is wrong with the core; `service` raises Unavailable while loading."""
    app = FastAPI(title="Kvoy engine", version=version("kvoy"))
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    read = ["GET", "HEAD"]

    @app.api_route("/health", methods=read)
    async def health() -> Response:
        """200 while the step loop is alive, also while the model loads."""
        reason = problem()
        if reason is not None:
            return _json({"status": "failed", "reason": reason}, 503)
        return _json({"status": readiness.phase.value})

    @app.api_route("/started", methods=read)
    async def started() -> Response:
        """200 once the model is loaded and, in a group, every process has joined."""
        is_loaded = readiness.phase is not Phase.LOADING
        return _json({"status": readiness.phase.value}, 200 if is_loaded else 503)

    @app.api_route("/ready", methods=read)
    async def ready() -> Response:
        """200 once requests may be sent here."""
        state = {"ready": is_ready(), "status": readiness.phase.value}
        return _json(state, 200 if state["ready"] else 503)

    @app.api_route("/metrics", methods=read)
    async def scrape() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.api_route("/version", methods=read)
    async def show_version() -> Response:
        return _json({"version": version("kvoy"), "engine": "kvoy"})

    @app.api_route("/v1/models", methods=read)
    async def models() -> Response:
        return Response(service().models(), media_type="application/json")

    @app.api_route("/v1/models/{name:path}", methods=read)
    async def model(name: str) -> Response:
        return Response(service().model_card(name), media_type="application/json")

    return app


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(
        error.to_json(), error.status, dict(error.headers()), media_type="application/json"
    )


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """The framework's own errors (no such path, no such method) as OpenAI error objects."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        answer: ApiError = MethodNotAllowed(
            f"Method {request.method} is not allowed here.",
            allow=(error.headers or {}).get("Allow", ""),
        )
    else:
        answer = NotFound(f"There is no {request.url.path[:200]} here.")
    return await _answer_api_error(request, answer)
