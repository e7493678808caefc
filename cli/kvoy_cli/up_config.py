"""The settings of `kvoy up`, and the arguments that they become for its engines and its router."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from kvoy_cli.ports import PortUse
from kvoy_contract.names import (
    DEFAULT_ENGINE_PORT,
    DEFAULT_ROUTER_PORT,
    TELEMETRY_PORT_OFFSET,
)
from kvoy_contract.settings import setting

DEFAULT_MODEL = "smollm2-135m-instruct"
SIM_MODEL = "sim"
MAX_ENGINES = 64


@dataclass(frozen=True, slots=True)
class UpConfig:
    """Every setting of one local stack; `__post_init__` raises ValueError naming the flag."""

    model: str | None = setting(
        None,
        positional=True,
        metavar="MODEL",
        help="a name of `kvoy model list`, a folder, a GGUF file or hf://org/name@revision "
        f"(default: {DEFAULT_MODEL}; with --runner sim a name alone, default {SIM_MODEL})",
    )
    engines: int = setting(2, help="number of engines: two show what routing does")
    runner: str = setting(
        "torch",
        choices=("torch", "sim"),
        help="the model itself, or a timing model in its place (no torch, no model needed)",
    )
    host: str = setting(
        "127.0.0.1", help="address that the router listens on; engines stay on loopback"
    )
    port: int = setting(DEFAULT_ROUTER_PORT, help="HTTP port of the endpoint")
    engine_port: int = setting(
        DEFAULT_ENGINE_PORT,
        help="HTTP port of the first engine; the next ones follow, and each one's telemetry is "
        f"{TELEMETRY_PORT_OFFSET} above",
    )
    policy: str = setting(
        "kv-aware",
        choices=("kv-aware", "least-load", "round-robin", "random"),
        help="how the router picks an engine",
    )
    served_model_name: str | None = setting(
        None, help="name of the model in requests (default: from MODEL)"
    )
    dtype: str | None = setting(
        None,
        choices=("auto", "float64", "float32", "float16", "bfloat16"),
        help="weights and activations of the engines (default: as `kvoy serve`)",
    )
    max_model_len: int | None = setting(
        None, help="tokens of a prompt with its completion (default: the model's own limit)"
    )
    kv_cache_memory_bytes: str | None = setting(
        None,
        metavar="BYTES",
        help="KV cache of each engine, as 1GiB (default: half of the free memory, divided by the "
        "engines, 2GiB at most)",
    )
    num_threads: int | None = setting(
        None, help="CPU threads of each engine (default: cores divided by engines)"
    )
    engine_args: str = setting(
        "", metavar="TEXT", help="more options for every engine, as `kvoy serve --help` has them"
    )
    router_args: str = setting(
        "", metavar="TEXT", help="more options for the router, as `kvoy router --help` has them"
    )
    secret: str | None = setting(
        None,
        metavar="TEXT",
        help="the secret between router and engines (default: a random one for each start)",
    )
    question: str = setting(
        "What is the capital of France? Answer in one sentence.",
        metavar="TEXT",
        help="asked once, to show that the stack answers",
    )
    ask: bool = setting(True, help="ask that question at all")
    ready_timeout_s: float = setting(
        600.0, help="seconds that the stack may take to become ready, once the model is there"
    )

    def __post_init__(self) -> None:
        if not 1 <= self.engines <= MAX_ENGINES:
            raise ValueError(f"--engines must be in 1..{MAX_ENGINES}, not {self.engines}")
        last_port = self.engine_port + self.engines - 1 + TELEMETRY_PORT_OFFSET
        for name, port, last in (
            ("port", self.port, self.port),
            ("engine-port", self.engine_port, last_port),
        ):
            if not (port >= 1 and last <= 65_535):
                raise ValueError(f"--{name} must leave all ports in 1..65535, not {port}")
        for name in ("num_threads", "max_model_len", "ready_timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value}")
        for name in ("engine_args", "router_args"):
            try:
                shlex.split(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')}: {error}") from error

    @property
    def is_sim(self) -> bool:
        return self.runner == "sim"

    @property
    def model_ref(self) -> str:
        return self.model or (SIM_MODEL if self.is_sim else DEFAULT_MODEL)

    @property
    def reachable_host(self) -> str:
        """An address of this machine at which the router answers."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    @property
    def engine_ports(self) -> list[int]:
        return [self.engine_port + index for index in range(self.engines)]

    def port_uses(self) -> list[PortUse]:
        """Every port that the stack will listen on."""
        uses = [PortUse(self.port, "the router", "--port")]
        for port in self.engine_ports:
            uses.append(PortUse(port, f"engine {port}", "--engine-port"))
            telemetry = port + TELEMETRY_PORT_OFFSET
            uses.append(PortUse(telemetry, f"engine {port}'s telemetry", "--engine-port"))
        return uses

    def engine_command(self, port: int, model: Path | str, name: str, threads: int) -> list[str]:
        """`serve ...`: the arguments of `kvoy` for the engine on that port."""
        command = ["serve", str(model), "--runner", self.runner, "--port", str(port)]
        command += ["--host", "127.0.0.1", "--served-model-name", name, "--expect-router"]
        if not self.is_sim:
            command += ["--num-threads", str(self.num_threads or threads)]
        for option, value in (
            ("dtype", self.dtype),
            ("max-model-len", self.max_model_len),
            ("kv-cache-memory-bytes", self.kv_cache_memory_bytes),
        ):
            if value is not None:
                command += [f"--{option}", str(value)]
        return command + shlex.split(self.engine_args)

    def router_command(self) -> list[str]:
        """`router ...`: the arguments of `kvoy` for the router."""
        command = ["router", "--host", self.host, "--port", str(self.port)]
        command += ["--policy", self.policy]
        command += ["--engine", *(f"127.0.0.1:{port}" for port in self.engine_ports)]
        return command + shlex.split(self.router_args)

    def child_environment(self, secret: str, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of every child: ours, with the secret, without this command's settings.

        Their values go on as arguments: `KVOY_PORT` is the router's port here, not each engine's.
        """
        own = {f"KVOY_{field.name.upper()}" for field in fields(self)} | {"KVOY_CONFIG"}
        kept = {key: value for key, value in environment.items() if key not in own}
        return {**kept, "KVOY_SECRET": secret, "PYTHONUNBUFFERED": "1"}


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
