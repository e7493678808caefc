"""The router's routes on the main port, and the admin application beside or behind them.

Main: /v1/chat/completions, /v1/completions, /v1/models[/{id}], /tokenize, /detokenize, /health,
/ready, answered without a framework. Admin (FastAPI): /metrics, /debug/engines, /debug/decisions,
/docs; on the main port unless an admin port was asked for, which also has /health and /ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from fastapi import FastAPI, Query
from fastapi import Response as FastApiResponse
from starlette.exceptions import HTTPException

from kvoy_contract.errors import ApiError, BadRequest, MethodNotAllowed, ModelNotFound, NotFound
from kvoy_contract.names import (
    CHAT_COMPLETIONS_PATH,
    COMPLETIONS_PATH,
    DETOKENIZE_PATH,
    MODELS_PATH,
    TOKENIZE_PATH,
)
from kvoy_contract.openai import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    encode,
    parse_detokenize,
    parse_tokenize,
)
from kvoy_router.access import Client
from kvoy_router.asgi_bridge import AsgiApp, run_asgi
from kvoy_router.breaker import Breakers
from kvoy_router.client_headers import check_headers
from kvoy_router.dispatch import Dispatcher
from kvoy_router.entrance import Entrance
from kvoy_router.http_message import JSON_TYPE, Request
from kvoy_router.http_response import Response
from kvoy_router.metrics import Metrics
from kvoy_router.pairs import pairs
from kvoy_router.pool import Pool
from kvoy_router.prompts import INLINE_BODY_BYTES, Prompts
from kvoy_router.proxy import Proxy

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GENERATING = frozenset({CHAT_COMPLETIONS_PATH, COMPLETIONS_PATH})
_HEALTH_PATHS = frozenset({"/health", "/ready"})


class Api:
    """`serve_main` and `serve_admin` are the handlers of the two ports."""

    def __init__(
        self,
        proxy: Proxy,
        entrance: Entrance,
        dispatcher: Dispatcher,
        pool: Pool,
        prompts: Prompts,
        admin: AsgiApp,
        *,
        admin_on_main_port: bool,
        unready_reason: Callable[[], str | None],
    ) -> None:
        """`unready_reason` says why this router is not ready; None when it is."""
        self._proxy = proxy
        self._entrance = entrance
        self._dispatcher = dispatcher
        self._pool = pool
        self._prompts = prompts
        self._admin = admin
        self._admin_on_main_port = admin_on_main_port
        self._unready_reason = unready_reason
        self._started = int(time.time())
        self._posts = {TOKENIZE_PATH: self._tokenize, DETOKENIZE_PATH: self._detokenize}
        self._gets: dict[str, Callable[[Response], None]] = {
            "/health": self._health,
            "/ready": self._ready,
        }

    async def serve_main(self, request: Request, response: Response) -> None:
        path = request.path
        if path in _GENERATING and request.method == "POST":
            await self._proxy.serve(request, response)
            return
        methods = self._methods_of(path)
        if methods is None:
            if not self._admin_on_main_port:
                raise NotFound(f"There is no {path} here.")
            await run_asgi(self._admin, request, response)
        elif request.method == "OPTIONS":
            response.send(204, [(b"allow", methods)])
        elif request.method.encode() not in methods.split(b", "):
            allowed = methods.decode()
            raise MethodNotAllowed(f"{path} takes {allowed}.", allow=allowed)
        elif path in self._posts:
            check_headers(request)
            await self._posts[path](request, self._entrance.identify(request), response)
        elif path in self._gets:
            self._gets[path](response)
        else:
            self._show_models(path, self._entrance.identify(request), response)

    async def serve_admin(self, request: Request, response: Response) -> None:
        if request.path in _HEALTH_PATHS and request.method in ("GET", "HEAD"):
            self._gets[request.path](response)
        else:
            await run_asgi(self._admin, request, response)

    def _methods_of(self, path: str) -> bytes | None:
        """What Allow says of a path of the main API; None for any other path."""
        if path in _GENERATING or path in self._posts:
            return b"POST, OPTIONS"
        if path in self._gets or path == MODELS_PATH or path.startswith(MODELS_PATH + "/"):
            return b"GET, HEAD, OPTIONS"
        return None

    def _health(self, response: Response) -> None:
        response.send(200, [JSON_TYPE], b'{"status":"ok"}')

    def _ready(self, response: Response) -> None:
        reason = self._unready_reason()
        status = 200 if reason is None else 503
        body = msgspec.json.encode({"status": reason or "ready"})
        response.send(status, [JSON_TYPE], body)

    def _cards(self, client: Client) -> dict[str, ModelCard]:
        """Of the models that the client may use."""
        cards = {}
        for name in filter(client.allows, self._pool.models()):
            infos = [e.info for e in self._pool.endpoints_of(name) if e.info is not None]
            limits = [info.max_model_len for info in infos if info.max_model_len]
            root = infos[0].served_model if infos and infos[0].served_model != name else None
            cards[name] = ModelCard(
                id=name,
                created=self._started,
                root=root,
                max_model_len=max(limits, default=None),
            )
        return cards

    def _show_models(self, path: str, client: Client, response: Response) -> None:
        """All, or the one that the path names. Raises ModelNotFound."""
        cards = self._cards(client)
        if path == MODELS_PATH:
            response.send(200, [JSON_TYPE], encode(ModelList(data=list(cards.values()))))
            return
        name = path.removeprefix(MODELS_PATH + "/")
        card = cards.get(name)
        if card is None:
            raise ModelNotFound(name)
        response.send(200, [JSON_TYPE], encode(card))

    def _model_or_only(self, model: str | None, client: Client) -> str:
        names = list(filter(client.allows, self._pool.models()))
        if model is not None:
            client.check_model(model)
            return model
        if len(names) != 1:
            raise BadRequest("Several models are served; name one.", param="model")
        return names[0]

    async def _tokenize(self, request: Request, client: Client, response: Response) -> None:
        dispatcher, body = self._dispatcher, request.body
        async with dispatcher.room_to_decode(request.path, body), dispatcher.room_to_tokenize(body):
            await self._tokenize_in_room(request, client, response)

    async def _tokenize_in_room(self, request: Request, client: Client, response: Response) -> None:
        parsed = await self._dispatcher.decode(parse_tokenize, request.body)
        encoder, info = self._dispatcher.encoder_for(self._model_or_only(parsed.model, client))

        def work() -> bytes:
            if parsed.messages is not None:
                ids = encoder.encode_chat(parsed.as_chat())
            else:
                ids = encoder.encode_text(parsed.prompt or "", parsed.add_special_tokens)
            texts = [encoder.token_text(i) for i in ids] if parsed.return_token_strs else None
            return encode(
                TokenizeResponse(
                    count=len(ids), max_model_len=info.max_model_len, tokens=ids, token_strs=texts
                )
            )

        is_short = len(request.body) <= INLINE_BODY_BYTES
        answer = work() if is_short else await self._prompts.aside(work)
        response.send(200, [JSON_TYPE], answer)

    async def _detokenize(self, request: Request, client: Client, response: Response) -> None:
        async with self._dispatcher.room_to_decode(request.path, request.body):
            await self._detokenize_in_room(request, client, response)

    async def _detokenize_in_room(
        self, request: Request, client: Client, response: Response
    ) -> None:
        parsed = await self._dispatcher.decode(parse_detokenize, request.body)
        encoder, _ = self._dispatcher.encoder_for(self._model_or_only(parsed.model, client))

        def work() -> bytes:
            text = encoder.decode(parsed.tokens, skip_special_tokens=False)
            return encode(DetokenizeResponse(prompt=text))

        response.send(200, [JSON_TYPE], await self._prompts.aside(work))


def make_admin_app(
    pool: Pool,
    dispatcher: Dispatcher,
    breakers: Breakers,
    metrics: Metrics,
    now_s: Callable[[], float],
    version: str,
) -> FastAPI:
    """Metrics, debug routes and the generated docs."""
    app = FastAPI(
        title="Kvoy router: admin",
        version=version,
        description="What this router knows and why it decided as it did.",
    )

    @app.get("/metrics", response_class=FastApiResponse)
    async def read_metrics() -> FastApiResponse:
        """Prometheus text format."""
        return FastApiResponse(metrics.expose(), media_type=_METRICS_TYPE)

    @app.get("/debug/engines")
    async def list_engines() -> FastApiResponse:
        """Each engine as this router knows it; `null` is unknown. `pairs` lists what could serve
        split requests: revisions with ready engines in both pools."""
        return _json(
            {
                "router_id": pool.router_id,
                "engines": [
                    described | {"breaker": breakers.state(endpoint, now_s())}
                    for endpoint, described in zip(
                        pool.endpoints, pool.describe_endpoints(now_s()), strict=True
                    )
                ],
                "pairs": pairs(pool.endpoints),
            }
        )

    @app.get("/debug/decisions")
    async def list_decisions(
        request_id: str | None = None, limit: int = Query(50, ge=1, le=10_000)
    ) -> FastApiResponse:
        """The latest routing decisions with their reasons, newest first."""
        return _json({"decisions": dispatcher.decisions(request_id, limit)})

    @app.exception_handler(404)
    async def not_found(request: object, error: Exception) -> FastApiResponse:
        return _error(NotFound("There is no such path here."))

    @app.exception_handler(405)
    async def not_allowed(request: object, error: Exception) -> FastApiResponse:
        assert isinstance(error, HTTPException)
        allowed = (error.headers or {}).get("Allow", "")
        return _error(MethodNotAllowed("This path does not take that method.", allow=allowed))

    return app


def _json(value: object) -> FastApiResponse:
    return FastApiResponse(msgspec.json.encode(value), media_type="application/json")


def _error(error: ApiError) -> FastApiResponse:
    return FastApiResponse(
        error.to_json(), error.status, dict(error.headers()), media_type="application/json"
    )
