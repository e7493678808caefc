"""One engine as a server: its sockets, its phases from loading to drained, and everything joined.

`EngineServer.run` is the whole life of an engine. It listens before the model is loaded, so that a
port in use is known at once and health can be asked while loading; telemetry says until then that
the model is still loading.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import grpc.aio
import uvicorn

from kvoy_contract import names
from kvoy_contract.errors import Unavailable
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb
from kvoy_contract.tracing import Tracing
from kvoy_engine import telemetry
from kvoy_engine.admission import MAX_ROUTERS
from kvoy_engine.asgi import Receive, Scope, Send
from kvoy_engine.batch import RunnerInfo
from kvoy_engine.build import CoreInfo, ModelLoadFailed
from kvoy_engine.config import EngineConfig
from kvoy_engine.events import first_event
from kvoy_engine.group_leader import GroupIncomplete
from kvoy_engine.health import CoreWatch, Phase, Readiness
from kvoy_engine.http_server import STOP_TIMEOUT_S, StartFailed, create_http, listen, new_socket
from kvoy_engine.link import CoreLink
from kvoy_engine.loop import CoreClient
from kvoy_engine.messages import Load
from kvoy_engine.metrics import EngineGauges, EngineMetrics, engine_info
from kvoy_engine.openai_routes import RETRY_AFTER_S, OpenAiRoutes
from kvoy_engine.operations import create_operations_app
from kvoy_engine.served_model import ServedModel
from kvoy_engine.service import TextService
from kvoy_engine.watch import MAX_PENDING_HASHES, WatchHub
from kvoy_engine.watch_stream import LiveState

logger = logging.getLogger(__name__)

FAILURE_LINGER_S: Final = 1.0
"""Between a core's death and the end of the process: errors reach their clients, health shows red.
"""


class ModelNotLoaded(StartFailed):
    """There is no model to serve."""

    reason = "ModelLoadFailed"


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What loading yields, whichever runner and process the core has."""

    client: CoreClient
    info: CoreInfo
    model: ServedModel


class EngineServer:
    """Owns one engine's sockets and objects, on the running event loop."""

    def __init__(
        self,
        config: EngineConfig,
        load: Callable[[], Awaitable[LoadedEngine]],
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
    ) -> None:
        """`tracing` gives its times by the same clock."""
        self._config = config
        self._load = load
        self._clock = clock
        self._started_s = clock()
        self._epoch = os.urandom(16)
        self._readiness = Readiness(config.expect_router, config.router_wait_s)
        self._hub = WatchHub(self._readiness, clock)
        self._metrics = EngineMetrics(self._read_gauges, engine_info(config))
        self._routes = OpenAiRoutes(config, self._readiness, self._metrics, clock, tracing)
        self._telemetry = telemetry.TelemetryServicer(self._hub, self._live_state, config.secret)
        self._link: CoreLink | None = None
        self._memory: dict[str, int] = {}
        self._drain = asyncio.Event()
        self._stop = asyncio.Event()
        self.started = asyncio.Event()
        """Set once both ports are known and the model is loaded."""
        self.http_port = 0
        self.grpc_port = 0

    def request_drain(self) -> None:
        """Refuse new requests, finish the running ones, end. A second time: end at once."""
        if self._drain.is_set():
            self._stop.set()
        self._drain.set()

    def begin_drain(self) -> None:
        """The same, however often: another process of the group was told to end."""
        self._drain.set()

    async def run(self) -> int:
        """Serve until drained or failed; the exit status. Raises StartFailed."""
        grpc_server = telemetry.create_server()
        telemetry.add_services(grpc_server, self._telemetry, self.is_ready)
        with listen(self._config.host, self._config.port) as listener:
            self.http_port = listener.getsockname()[1]
            self.grpc_port = self._bind_grpc(grpc_server)
            await grpc_server.start()
            http = self._create_http()
            serving = asyncio.ensure_future(http.serve(sockets=[listener]))
            try:
                return await self._live()
            finally:
                http.should_exit = True
                await serving
                await grpc_server.stop(grace=0.2)

    async def _live(self) -> int:
        """Load, serve, drain; whatever was loaded is closed at the end."""
        loaded = await self._load_unless_stopped()
        if loaded is None:
            return 0
        link = self._attach(loaded)
        supervisor = asyncio.ensure_future(link.supervise())
        try:
            self._telemetry.describe(
                describe(loaded, self._epoch, self._config), loaded.model.tokenizer.parts
            )
            self._readiness.on_loaded(self._clock())
            self.started.set()
            logger.info("runner", extra=log_fields(loaded.info.runner.details))
            logger.info(
                "engine serves model=%s url=http://%s:%d telemetry_port=%d",
                loaded.model.names[0],
                self._config.host,
                self.http_port,
                self.grpc_port,
            )
            return await self._serve_until_end(link)
        finally:
            supervisor.cancel()
            await loaded.client.close()
            if self._routes.service is not None:
                self._routes.service.close()

    async def _load_unless_stopped(self) -> LoadedEngine | None:
        loading = asyncio.ensure_future(self._load())
        draining = asyncio.ensure_future(self._drain.wait())
        await asyncio.wait((loading, draining), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        if not loading.done():
            loading.cancel()
            return None
        try:
            return loading.result()
        except GroupIncomplete as error:
            raise StartFailed(str(error)) from error
        except ModelLoadFailed as error:
            raise ModelNotLoaded(str(error)) from error
        except Exception as error:
            logger.exception("loading failed")
            raise ModelNotLoaded(f"loading failed: {type(error).__name__}: {error}") from error

    def _attach(self, loaded: LoadedEngine) -> CoreLink:
        watch = CoreWatch(self._config.stall_timeout_s, loaded.info.max_num_batched_tokens)
        link = CoreLink(loaded.client, watch, (self._hub, self._metrics), self._clock)
        loaded.client.start(link)
        self._memory = memory_bytes(loaded.info.runner)
        self._hub.load = Load(
            free_blocks=loaded.info.runner.num_blocks, total_blocks=loaded.info.runner.num_blocks
        )
        self._link = link
        self._routes.service = TextService(
            loaded.model, link, self._hub, self._metrics, self._clock, self._config.seed
        )
        return link

    async def _serve_until_end(self, link: CoreLink) -> int:
        await first_event(self._drain, link.failed)
        if link.failed.is_set():
            logger.error("engine ends: its core failed")
            self._hub.announce()
            await first_event(self._stop, timeout_s=FAILURE_LINGER_S)
            return 1
        await self._finish_requests(link)
        return 1 if link.failed.is_set() else 0

    async def _finish_requests(self, link: CoreLink) -> None:
        """Unready first; then wait for the running requests, but no longer than allowed."""
        self._readiness.on_drain()
        self._hub.announce()
        logger.info("engine drains open_requests=%d", self._routes.num_open)
        await first_event(self._routes.idle, self._stop, timeout_s=self._config.drain_timeout_s)
        if self._routes.num_open:
            logger.warning("engine ends with open requests count=%d", self._routes.num_open)
            link.fail_all(Unavailable("This engine shuts down.", retry_after_s=RETRY_AFTER_S))
            await first_event(self._routes.idle, timeout_s=STOP_TIMEOUT_S)

    def is_ready(self) -> bool:
        return self._problem() is None and self._hub.is_ready()

    def _problem(self) -> str | None:
        return None if self._link is None else self._link.problem()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The hot routes directly, everything else through the framework."""
        handler = self._hot_routes.get(scope["path"]) if scope["type"] == "http" else None
        await (handler or self._operations)(scope, receive, send)

    def _create_http(self) -> uvicorn.Server:
        routes = self._routes
        self._hot_routes = {
            names.CHAT_COMPLETIONS_PATH: routes.chat,
            names.COMPLETIONS_PATH: routes.completions,
            names.TOKENIZE_PATH: routes.tokenize,
            names.DETOKENIZE_PATH: routes.detokenize,
        }
        self._operations = create_operations_app(
            self._readiness, self._metrics, self._problem, self.is_ready, routes.require_service
        )
        return create_http(self._app, self._config)

    def _bind_grpc(self, server: grpc.aio.Server) -> int:
        port = self._config.grpc_port(self.http_port)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        try:
            # gRPC reports a failure on standard error before it raises; asked first, we say it.
            with new_socket(self._config.host) as probe:
                probe.bind((self._config.host, port))
            bound: int = server.add_insecure_port(f"{host}:{port}")
        except OSError as error:
            reason = error.strerror
            raise StartFailed(f"cannot listen on {host}:{port} (telemetry): {reason}") from None
        except RuntimeError:
            raise StartFailed(f"cannot listen on {host}:{port} (telemetry): in use") from None
        return bound

    def _live_state(self) -> LiveState:
        return LiveState(
            uptime_s=self._clock() - self._started_s,
            last_step_age_s=self._link.last_step_age_s() if self._link else 0.0,
            is_draining=self._readiness.phase is Phase.DRAINING,
            is_ready=self.is_ready(),
            free_device_bytes=self._memory.get("free_after_loading", 0),
        )

    def _read_gauges(self) -> EngineGauges:
        hub = self._hub
        return EngineGauges(
            hub.load,
            is_ready=self.is_ready(),
            last_step_age_s=self._link.last_step_age_s() if self._link else 0.0,
            memory=self._memory,
            sizes={
                "open_requests": self._routes.num_open,
                "waiting_sequences": hub.load.waiting,
                "reported_hashes": hub.num_hashes,
                "watch_streams": hub.num_watchers,
                "pending_hashes": hub.num_pending,
                "router_ledgers": len(hub.ledger),
            },
            bounds={
                "waiting_sequences": self._config.max_num_waiting,
                "reported_hashes": hub.load.total_blocks,
                "watch_streams": telemetry.MAX_STREAMS,
                "pending_hashes": MAX_PENDING_HASHES,
                "router_ledgers": MAX_ROUTERS,
            },
        )


def memory_bytes(runner: RunnerInfo) -> dict[str, int]:
    """Where a loaded runner's memory went."""
    return {
        "weights": runner.weights_bytes,
        "kv_cache": runner.num_blocks * runner.block_bytes,
        "kv_block": runner.block_bytes,
        "free_after_loading": runner.free_device_bytes,
    }


def log_fields(details: Mapping[str, str]) -> dict[str, str]:
    """Names for people (`kv cache`) as names of log fields (`kv_cache`)."""
    return {re.sub(r"\W+", "_", name).strip("_"): detail for name, detail in details.items()}


def describe(loaded: LoadedEngine, epoch: bytes, config: EngineConfig) -> pb.EngineDescription:
    """Who this engine is, for its whole life. Only a secret allows envelopes."""
    has_secret = config.secret is not None
    info, runner, model = loaded.info, loaded.info.runner, loaded.model
    return pb.EngineDescription(
        epoch=epoch,
        served_model=model.names[0],
        aliases=model.names[1:],
        model_identity=info.model_identity,
        role=f"ROLE_{config.role.upper()}",
        block_size=runner.block_size,
        hash_stride=info.hash_stride,
        num_blocks=runner.num_blocks,
        block_bytes=runner.block_bytes,
        max_model_len=info.token_limit,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        tokenizer_digest=model.tokenizer.digest,
        numerics=runner.numerics,
        parallel=pb.ParallelSizes(
            tensor=config.tensor_parallel_size, pipeline=config.pipeline_parallel_size, data=1
        ),
        engine_kind="kvoy",
        engine_version=version("kvoy"),
        capabilities=pb.Capabilities(
            envelope=has_secret,
            token_ids=has_secret,
            resume=has_secret,
            cache_salt=True,
            admitted_through=has_secret,
        ),
        device_memory_bytes=runner.weights_bytes + runner.num_blocks * runner.block_bytes,
        vocab_size=runner.vocab_size,
    )
