"""One running router: its objects joined, from listening to draining.

`__main__` gives it the configuration and the signals; tests run it inside their own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from kvoy_contract.errors import ApiError
from kvoy_contract.settings import Settings
from kvoy_contract.tracing import Tracing
from kvoy_router.access import Access
from kvoy_router.api import Api, make_admin_app
from kvoy_router.breaker import BreakerLimits, Breakers
from kvoy_router.config import RouterConfig
from kvoy_router.config_file import ConfigFile
from kvoy_router.dispatch import Dispatcher
from kvoy_router.entrance import Entrance
from kvoy_router.errors import BadFile
from kvoy_router.failover import FailoverLimits
from kvoy_router.fleet import Fleet
from kvoy_router.flow_gate import FlowGate
from kvoy_router.flow_room import PoolRoom
from kvoy_router.found import FoundEngine
from kvoy_router.health_watch import HealthWatch
from kvoy_router.http_client import ClientPool
from kvoy_router.http_server import HttpServer
from kvoy_router.keys import Keyring
from kvoy_router.keys_file import KeysFile
from kvoy_router.metrics import Metrics
from kvoy_router.policies import make_policy
from kvoy_router.pool import Pool, PoolConfig
from kvoy_router.prefix_index import ENTRY_BYTES
from kvoy_router.prompts import Prompts
from kvoy_router.proxy import Proxy, ProxyOptions
from kvoy_router.resume_memory import ResumeMemory
from kvoy_router.retry_budget import RetryBudget
from kvoy_router.router_memory import RouterMemory
from kvoy_router.sources import Sources
from kvoy_router.state_gauges import ServerGauges
from kvoy_router.telemetry import TelemetryClient, TelemetryOptions
from kvoy_router.tls import TlsFiles

log = logging.getLogger(__name__)

_PRUNE_S = 1.0
_LONGEST_BREAK_S = 30.0


class Router:
    """Made inside a running event loop. `serving` is its life."""

    def __init__(
        self,
        config: RouterConfig,
        settings: Settings[RouterConfig] | None = None,
        on_config: Callable[[RouterConfig], None] = lambda config: None,
        tracing: Tracing | None = None,
    ) -> None:
        """`settings`: where `config` came from, if its file is to be followed; `on_config` hears
        of every new configuration.

        Raises NoClusterError when it is to ask Kubernetes and knows none, and BadFile.
        """
        self.config = config
        self.memory = RouterMemory(config.memory_mib, config.max_buffered_mib)
        self._on_config = on_config
        self._tracing = tracing
        # Not the loop's clock: uvloop's has steps of a millisecond.
        self._now_s = time.monotonic
        router_id = secrets.token_hex(8)
        generator = self._random = random.Random()
        self.pool = Pool(
            router_id,
            make_policy(config.policy, generator),
            config=PoolConfig(
                stale_after_s=config.stale_after_s,
                max_index_entries=self.memory.cache_bytes(config.index_mib) // ENTRY_BYTES,
                max_reports_per_s=config.max_reports_per_s,
            ),
            random=generator,
        )
        for name in config.model:
            self.pool.declare_model(name)
        self.prompts = Prompts(self.memory.cache_bytes(None))
        self.metrics = Metrics()
        self.clients = ClientPool(config.client_limits)
        self.breakers = Breakers(_breaker_limits(config))
        self.dispatcher = Dispatcher(
            self.pool,
            self.prompts,
            self.breakers,
            self._now_s,
            self.memory.bodies,
            config.decisions_kept,
        )
        self._budgets = (
            RetryBudget(config.retry_share, config.retry_burst),
            RetryBudget(config.retry_share, config.retry_burst),
        )
        self.resume_memory = ResumeMemory(self.memory.cache_bytes(config.max_resume_memory_mib))
        self._health = HealthWatch(
            self.pool, self.clients, self.breakers, self._now_s, config.hang_timeout_s
        )
        self._telemetry_options = TelemetryOptions(
            router_id, version("kvoy"), silence_s=config.stale_after_s
        )
        room = PoolRoom(self.pool, self.breakers.blocked)
        self.gate = FlowGate(room, config.flow_limits, self._now_s)
        self.keys_file, self.tls = self._read_files()
        self.config_file: ConfigFile | None = None
        if settings is not None and settings.file is not None:
            self.metrics.reloads.begin(time.time())
            self.config_file = ConfigFile(settings, settings.file, self.use_config, self._on_reload)
        keyring = None if self.keys_file is None else self.keys_file.keyring
        access = Access(keyring, config.objectives, time.time)
        self.entrance = Entrance(access, self.gate, self.pool, self.metrics, self._now_s)
        self.fleet = Fleet(self.pool, self.prompts, self._watch, self.metrics.forget_engine)
        self.sources = Sources(config, self.pool, self.fleet, self.metrics, self._now_s)
        self.proxy = self._make_proxy()
        api = self._make_api()
        self.server = HttpServer(
            api.serve_main,
            config.http_limits,
            self._on_refused,
            self.memory.bodies,
            self.entrance.check_key,
        )
        self.admin_server: HttpServer | None = None
        if config.admin_port is not None:
            self.admin_server = HttpServer(
                api.serve_admin, config.http_limits, memory=self.memory.bodies
            )
        self.metrics.observe(self.pool, self._gauges, self._now_s)
        self.metrics.flow.observe(self.gate.flow)
        self.metrics.failover.observe(
            self.pool, self.breakers, self._budgets, self.resume_memory, self._now_s
        )

    def use_config(self, config: RouterConfig) -> None:
        """Another one from now on; the settings that `config_file.FIXED` names are as they were.
        What is under way goes on."""
        if config.policy != self.config.policy:
            self.pool.use_policy(make_policy(config.policy, self._random))
        self.config = config
        self.breakers.limits = _breaker_limits(config)
        for budget in self._budgets:
            budget.share, budget.burst = config.retry_share, config.retry_burst
        self.resume_memory.max_bytes = self.memory.cache_bytes(config.max_resume_memory_mib)
        self.memory.use_bounds(config.max_buffered_mib)
        self._health.use_silence(config.hang_timeout_s)
        self.gate.flow.use_limits(config.flow_limits)
        self.entrance.use_objectives(config.objectives)
        self.clients.limits = config.client_limits
        self.proxy.use_options(_proxy_options(config, self.pool.router_id))
        self.server.limits = config.http_limits
        if self.admin_server is not None:
            self.admin_server.limits = config.http_limits
        self._on_config(config)

    def _on_reload(self, is_good: bool) -> None:
        self.metrics.reloads.on_reload(is_good, time.time())

    def _make_proxy(self) -> Proxy:
        return Proxy(
            self.entrance,
            self.dispatcher,
            self.clients,
            self.breakers,
            self.metrics,
            _proxy_options(self.config, self.pool.router_id),
            self._budgets,
            self.resume_memory,
            self._now_s,
            self._tracing,
        )

    def _make_api(self) -> Api:
        admin = make_admin_app(
            self.pool, self.dispatcher, self.breakers, self.metrics, self._now_s, version("kvoy")
        )
        return Api(
            self.proxy,
            self.entrance,
            self.dispatcher,
            self.pool,
            self.prompts,
            admin,
            admin_on_main_port=self.config.admin_port is None,
            unready_reason=self._unready_reason,
        )

    def _watch(self, engine: FoundEngine) -> asyncio.Task[None]:
        client = TelemetryClient(
            engine.address,
            self.pool,
            self.prompts,
            replace(self._telemetry_options, secret=engine.origin.secret),
            self._now_s,
            engine.origin.pod,
        )
        return asyncio.create_task(client.run(), name=f"telemetry {engine.address.http}")

    def _unready_reason(self) -> str | None:
        if self.server.is_draining:
            return "the router is draining"
        return self.sources.unready_reason()

    def _read_files(self) -> tuple[KeysFile | None, TlsFiles | None]:
        """Keys and certificate, where there are any. Raises BadFile."""
        config, keys, tls = self.config, None, None
        try:
            if config.keys_file is not None:
                keys = KeysFile(Path(config.keys_file), self._use_keys)
        except (OSError, ValueError) as error:
            raise BadFile(f"--keys-file {config.keys_file}: {error}") from None
        try:
            if config.tls_certificate is not None and config.tls_key is not None:
                tls = TlsFiles(Path(config.tls_certificate), Path(config.tls_key))
        except (OSError, ValueError) as error:
            raise BadFile(f"--tls-certificate, --tls-key: {error}") from None
        return keys, tls

    def _files(self) -> Iterator[tuple[str, KeysFile | TlsFiles | ConfigFile]]:
        if self.config_file is not None:
            yield "configuration file", self.config_file
        if self.keys_file is not None:
            yield "keys file", self.keys_file
        if self.tls is not None:
            yield "TLS files", self.tls

    def _use_keys(self, keyring: Keyring) -> None:
        self.entrance.use_keys(keyring)

    def _on_refused(self, error: ApiError) -> None:
        self.metrics.on_refused(error.status)

    def _gauges(self) -> ServerGauges:
        return ServerGauges(
            connections=self.server.num_connections,
            memory=self.memory.bodies,
            idle_engine_connections=self.clients.num_idle,
            suspect_requests=len(self.proxy.suspects),
            segment_bytes=self.prompts.segment_bytes,
            known_prefix_bytes=self.prompts.known_prefix_bytes,
            prompts_not_encoded=self.dispatcher.num_not_encoded,
            has_kubernetes=self.sources.has_kubernetes,
            has_fleet=self.sources.has_fleet,
            has_keys=None if self.keys_file is None else self.keys_file.error is None,
            has_certificate=None if self.tls is None else self.tls.error is None,
            has_config=None if self.config_file is None else self.config_file.error is None,
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen and watch; at the end drain the streams, then let go of everything.

        Raises OSError when a port cannot be bound.
        """
        servers = [self.server]
        options = {} if self.tls is None else {"ssl": self.tls.context}
        await self.server.listen(self.config.host, self.config.port, **options)
        if self.admin_server is not None and self.config.admin_port is not None:
            try:
                await self.admin_server.listen(self.config.host, self.config.admin_port)
            except OSError:
                await self.server.drain(0.0)
                raise
            servers.append(self.admin_server)
        helpers = [
            *(asyncio.create_task(run, name=name) for name, run in self.sources.runs()),
            asyncio.create_task(self._prune(), name="prune"),
            asyncio.create_task(self.memory.run(), name="memory"),
            asyncio.create_task(self._health.run(), name="health watch"),
            *(asyncio.create_task(file.run(), name=name) for name, file in self._files()),
        ]
        for task in helpers:
            task.add_done_callback(_tell_failure)
        try:
            yield
        finally:
            # The admin port answers to the end: probes see that this router is not ready any more.
            for server in servers:
                is_clean = await server.drain(self.config.drain_timeout_s)
                if not is_clean:
                    log.warning("requests were cut at the end of the drain timeout")
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self.fleet.close()
            self.clients.close()
            self.prompts.close()

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(_PRUNE_S)
            self.clients.prune()


def _breaker_limits(config: RouterConfig) -> BreakerLimits:
    return BreakerLimits(config.breaker_failures, config.breaker_pause_s, _LONGEST_BREAK_S)


def _proxy_options(config: RouterConfig, router_id: str) -> ProxyOptions:
    return ProxyOptions(
        router_id=router_id,
        response_headers=config.response_headers,
        request_timeout_s=config.request_timeout_s,
        failover=FailoverLimits(config.max_retries, config.max_resumes),
        max_progress_bytes=config.max_resume_kib * 1024,
        hedge=config.hedge_options,
    )


def _tell_failure(task: asyncio.Task[None]) -> None:
    """A defect ends a helper for good: say so while the router still serves."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a part of the router has ended", extra={"part": task.get_name()}, exc_info=error)
