"""A whole engine inside a test: real ports on loopback, a simulated or given runner, no process.

For tests of the engine's own surfaces and of whatever talks to an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvoy_contract.prompt import TokenizerFiles, byte_tokenizer_files
from kvoy_contract.tracing import Tracing
from kvoy_engine.batch import Batch, Runner, RunnerInfo, RunnerOutput
from kvoy_engine.build import assemble, build_core
from kvoy_engine.config import EngineConfig
from kvoy_engine.loading import served_model
from kvoy_engine.loop import ThreadCore
from kvoy_engine.server import EngineServer, LoadedEngine


@dataclass(frozen=True, slots=True)
class RunningEngine:
    server: EngineServer
    model: str
    running: asyncio.Task[int]
    """Ends with the engine's exit status."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.http_port}"

    @property
    def telemetry_address(self) -> str:
        return f"127.0.0.1:{self.server.grpc_port}"


class HookedRunner:
    """A runner around another one; `hook` sees every batch first and may answer in its place."""

    def __init__(self, inner: Runner, hook: Callable[[Batch], RunnerOutput | None]) -> None:
        self.inner = inner
        self.hook = hook

    @property
    def info(self) -> RunnerInfo:
        return self.inner.info

    def run(self, batch: Batch) -> RunnerOutput:
        answer = self.hook(batch)
        return self.inner.run(batch) if answer is None else answer

    def free_device_bytes(self) -> int:
        return self.inner.free_device_bytes()

    def close(self) -> None:
        self.inner.close()


def sim_config(**settings: Any) -> EngineConfig:
    """A fast simulated engine on free ports, with `settings` of its own."""
    defaults: dict[str, Any] = {"runner": "sim", "port": 0, "sim_base_s": 0.001, "model": "sim"}
    return EngineConfig(**(defaults | settings))


@asynccontextmanager
async def running_engine(
    config: EngineConfig | None = None,
    *,
    runner: Runner | None = None,
    tokenizer: TokenizerFiles | None = None,
    identity: str = "test",
    tracing: Tracing | None = None,
) -> AsyncIterator[RunningEngine]:
    """An engine that is loaded; drained at exit, if it has not ended by then."""
    config = config or sim_config()

    async def load() -> LoadedEngine:
        if runner is None:
            built = build_core(config, lambda text: None)
        else:
            built = assemble(runner, identity, config)
        names = config.served_model_name or (config.model_ref,)
        model = served_model(names, tokenizer or byte_tokenizer_files(), built.info)
        return LoadedEngine(ThreadCore(built.core, built.close), built.info, model)

    server = EngineServer(config, load, tracing=tracing)
    running = asyncio.ensure_future(server.run())
    started = asyncio.ensure_future(server.started.wait())
    try:
        await asyncio.wait((running, started), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            raise RuntimeError("the engine ended while it started")
        names = config.served_model_name or (config.model_ref,)
        yield RunningEngine(server, names[0], running)
    finally:
        started.cancel()
        if not running.done():
            server.request_drain()
            server.request_drain()
        await running
