"""The engine's whole configuration: one frozen value, read once in `__main__`.

Where vLLM has a flag for the same thing, ours has the same name. It knows nothing of torch, sockets
or models; a value that cannot be served is refused here, by the name of its flag.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvoy_contract.envelope import check_secret
from kvoy_contract.logs import FORMATS
from kvoy_contract.names import DEFAULT_ENGINE_PORT, GROUP_PORT, TELEMETRY_PORT_OFFSET
from kvoy_contract.settings import setting

MAX_PORT: Final = 65535
KIB: Final = 1024
MIB: Final = 1024 * KIB

_UNIT_BYTES: Final = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class ByteSize(int):
    """A number of bytes; text may carry a unit: `4GiB`, `512MB`, `1.5g`."""

    def __new__(cls, value: int | str) -> ByteSize:
        """Raises ValueError for text that is no size."""
        if isinstance(value, int):
            return super().__new__(cls, value)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value.lower())
        if match is None or match[2] not in _UNIT_BYTES:
            raise ValueError(f"{value!r} is not a number of bytes such as 4GiB")
        return super().__new__(cls, int(float(match[1]) * _UNIT_BYTES[match[2]]))


_DEFAULT_MAX_BODY: Final = ByteSize(32 * MIB)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every setting of one engine; `__post_init__` raises ValueError naming the wrong flag."""

    model: str | None = setting(
        None,
        positional=True,
        metavar="MODEL",
        help="folder, GGUF file, known name or hf://org/name@revision of the model; with --runner "
        "sim only a name (default there: sim)",
    )

    # What is served, and where.
    host: str = setting("127.0.0.1", help="address to listen on; 0.0.0.0 for every one")
    port: int = setting(DEFAULT_ENGINE_PORT, help="HTTP port; 0 takes a free one")
    telemetry_port: int | None = setting(
        None, help=f"gRPC port; 0 takes a free one (default: HTTP port + {TELEMETRY_PORT_OFFSET})"
    )
    served_model_name: tuple[str, ...] = setting(
        (), help="names of the model in requests, the first one in answers (default: MODEL's name)"
    )
    secret: str | None = setting(
        None,
        help="the per-service secret; without it no router may send its envelope",
        metavar="TEXT",
    )
    role: str = setting(
        "both",
        choices=("both", "prefill", "decode"),
        help="told to routers: a prefill engine gets no request alone, a decode engine can prefill",
    )
    expect_router: bool = setting(
        False,
        help="ready only once every connected router knows this engine, or after "
        "--router-wait-s seconds",
    )
    router_wait_s: float = setting(
        30.0, help="seconds after loading that readiness waits for routers at most"
    )

    # How the model runs.
    runner: str = setting(
        "torch", choices=("torch", "sim"), help="the model itself, or a timing model in its place"
    )
    core: str = setting(
        "thread",
        choices=("thread", "process"),
        help="where the step loop runs: beside the server, or in a process of its own",
    )
    dtype: str = setting(
        "auto",
        choices=("auto", "float64", "float32", "float16", "bfloat16", "half", "float"),
        help="weights and activations; auto: the fastest half precision",
    )
    kv_cache_dtype: str = setting(
        "auto",
        choices=("auto", "float64", "float32", "float16", "bfloat16"),
        help="KV cache; auto follows --dtype",
    )
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="where the model computes")
    kernels: str = setting(
        "auto",
        choices=("auto", "torch", "native"),
        help="CPU kernels: auto measures and takes the faster; compiled by the first start on a "
        "machine, or ahead, for images, by `python -m kvoy_engine.kernels`",
    )
    num_threads: int | None = setting(
        None,
        help="CPU threads of the model (default: the cores that this process or its container may "
        "use)",
    )
    tensor_parallel_size: int = setting(
        1, help="devices that share each layer; above 1 with --runner sim alone, whose pace stays"
    )
    pipeline_parallel_size: int = setting(
        1, help="groups of layers; above 1 with --runner sim alone, whose pace stays"
    )
    download_dir: str | None = setting(
        None,
        metavar="DIR",
        help="folder for models of a hub, also one that many pods share: downloaded once, under a "
        "lock (default: the hub's own cache, HF_HOME)",
    )
    tokenizer: str | None = setting(
        None, help="folder with another tokenizer (with --runner sim: instead of plain bytes)"
    )
    seed: int | None = setting(
        None, help="makes requests without a seed of their own repeatable (default: they differ)"
    )

    # A group of processes that serve one model: rank 0 serves, the others join it.
    nnodes: int = setting(1, help="processes of the group (else $LWS_GROUP_SIZE)")
    node_rank: int = setting(
        0, help="this process' number, 0 for the one that serves (else $LWS_WORKER_INDEX)"
    )
    master_addr: str = setting("", help="name or address of rank 0 (else $LWS_LEADER_ADDRESS)")
    master_port: int = setting(GROUP_PORT, help="where rank 0 waits for the others")
    group_timeout_s: float = setting(
        1800.0, help="seconds in which all processes of the group must have found each other"
    )

    # Memory and batching.
    max_model_len: int | None = setting(
        None, help="tokens of a prompt with its completion (default: the model's own limit)"
    )
    max_num_seqs: int = setting(256, help="sequences that run at once")
    max_num_batched_tokens: int | None = setting(
        None, help="tokens that one step computes at most (default: 2048, simulated 8192)"
    )
    max_num_waiting: int = setting(
        4096, help="sequences that may wait; more are refused with status 429"
    )
    gpu_memory_utilization: float | None = setting(
        None,
        help="share of the memory for weights and KV cache: of the GPU's (default: 0.9); on the "
        "CPU of the machine's or container's (default: a quarter of what is free, 4 GiB at most, "
        "for the KV cache); simulated, 0.9 stands for 4096 blocks",
    )
    kv_cache_memory_bytes: ByteSize | None = setting(  # noqa: RUF009 (makes a field)
        None, metavar="BYTES", help="size of the KV cache, as 4GiB (default: from free memory)"
    )
    num_gpu_blocks_override: int | None = setting(
        None, help="number of KV blocks, instead of one derived from memory"
    )
    block_size: int = setting(16, help="tokens of one KV block")
    hash_stride: int = setting(
        64, help="tokens between the block hashes told to routers; a multiple of --block-size"
    )
    interference_ratio: float = setting(
        2.22,
        help="while sequences stream, a step with prompt chunks takes at most so many times a step "
        "without; 0: no bound",
    )
    background_ratio: float = setting(
        1.75,
        help="the same for prompts of less important requests while more important ones come; "
        "0: no bound",
    )
    max_step_s: float = setting(
        1.0,
        help="estimated seconds that a step with prompt chunks takes at most: aborts and new "
        "requests are heard between steps; 0: no bound",
    )
    enable_prefix_caching: bool = setting(True, help="reuse the KV blocks of equal prefixes")

    # The timing model of `--runner sim`: an 8-billion-parameter model on one large accelerator.
    sim_base_s: float = setting(0.014, help="simulated seconds of every step")
    sim_prefill_tokens_per_s: float = setting(16000.0, help="simulated prompt tokens per second")
    sim_context_token_s: float = setting(
        55e-9, help="simulated seconds that each token of context adds to a step"
    )
    sim_row_s: float = setting(0.0, help="simulated seconds that each sequence adds to a step")
    step_log: str | None = setting(
        None,
        metavar="FILE",
        help="add a line of JSON for each step to this file: its time, rows, tokens, and context",
    )

    # The server's limits, in seconds and bytes.
    max_body_bytes: ByteSize = setting(  # noqa: RUF009 (makes a field)
        _DEFAULT_MAX_BODY, metavar="BYTES", help="larger request bodies get status 413"
    )
    request_read_timeout_s: float = setting(
        60.0, help="seconds in which a client must have sent its whole request"
    )
    keep_alive_s: float = setting(75.0, help="seconds that an idle connection stays open")
    drain_timeout_s: float = setting(
        120.0, help="seconds that running requests may take to finish after SIGTERM"
    )
    stall_timeout_s: float = setting(
        10.0,
        help="seconds without progress after which the step loop counts as stuck; grows to five "
        "times what a full step is expected to take",
    )
    log_level: str = setting(
        "info", choices=("debug", "info", "warning", "error"), help="least severe line to log"
    )
    log_format: str = setting("text", choices=FORMATS, help="one line per event")

    def __post_init__(self) -> None:
        self._check_served_model()
        self._check_ports()
        self._check_parallel()
        self._check_blocks()
        try:
            check_secret(self.secret)
        except ValueError as error:
            raise ValueError(f"--secret: {error}") from None
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative, not {value}")
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise ValueError(f"--gpu-memory-utilization must be in (0, 1], not {share}")

    def _check_served_model(self) -> None:
        if self.model is None and self.runner != "sim":
            raise ValueError("MODEL is missing: a folder, a known name or hf://org/name")
        if any(not name for name in self.served_model_name):
            raise ValueError("--served-model-name must not be empty")

    def _check_ports(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"--port must be in 0..{MAX_PORT}, not {self.port}")
        if self.telemetry_port is None and self.port > MAX_PORT - TELEMETRY_PORT_OFFSET:
            raise ValueError(f"--telemetry-port is needed where --port is {self.port}")
        if not 0 < self.master_port <= MAX_PORT:
            raise ValueError(f"--master-port must be in 1..{MAX_PORT}, not {self.master_port}")
        if not 0 <= (self.telemetry_port or 0) <= MAX_PORT:
            raise ValueError(
                f"--telemetry-port must be in 0..{MAX_PORT}, not {self.telemetry_port}"
            )

    def _check_parallel(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "nnodes"):
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if value < 1:
                raise ValueError(f"{flag} must be at least 1, not {value}")
            if value > 1 and not self.is_sim:
                raise ValueError(f"{flag} {value} is not supported without --runner sim: only 1 is")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"--node-rank must be in 0..{self.nnodes - 1}, not {self.node_rank}")
        num_devices = self.tensor_parallel_size * self.pipeline_parallel_size
        if num_devices % self.nnodes:
            raise ValueError(
                f"--tensor-parallel-size {self.tensor_parallel_size} times "
                f"--pipeline-parallel-size {self.pipeline_parallel_size} must be a multiple of "
                f"--nnodes {self.nnodes}"
            )
        if self.is_worker and not self.master_addr.strip():
            raise ValueError("--master-addr must not be empty where --node-rank is above 0")

    def _check_blocks(self) -> None:
        if self.block_size < 1 or self.hash_stride < 1 or self.hash_stride % self.block_size:
            raise ValueError(
                f"--hash-stride ({self.hash_stride}) must be a multiple of --block-size "
                f"({self.block_size})"
            )

    @property
    def is_sim(self) -> bool:
        return self.runner == "sim"

    @property
    def is_worker(self) -> bool:
        """Whether this process joins another one that serves."""
        return self.node_rank > 0

    @property
    def model_ref(self) -> str:
        return self.model or "sim"

    @property
    def token_budget(self) -> int:
        """Tokens that one step computes at most."""
        return self.max_num_batched_tokens or (8192 if self.is_sim else 2048)

    def grpc_port(self, http_port: int) -> int:
        """The telemetry port, once the HTTP port is known; 0 follows a free HTTP port freely."""
        if self.telemetry_port is not None:
            return self.telemetry_port
        return 0 if self.port == 0 else http_port + TELEMETRY_PORT_OFFSET


_POSITIVE: Final = (
    "num_threads",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_waiting",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "sim_prefill_tokens_per_s",
    "max_body_bytes",
    "request_read_timeout_s",
    "keep_alive_s",
    "stall_timeout_s",
    "group_timeout_s",
)
_NOT_NEGATIVE: Final = (
    "router_wait_s",
    "max_step_s",
    "sim_base_s",
    "sim_context_token_s",
    "sim_row_s",
    "drain_timeout_s",
)
