"""The router's whole configuration; flags, environment and file come from it (see
contract.settings)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from kvoy_contract.envelope import check_secret
from kvoy_contract.logs import FORMATS
from kvoy_contract.names import DEFAULT_ROUTER_PORT, TELEMETRY_PORT_OFFSET
from kvoy_contract.settings import setting
from kvoy_router.flow_ticket import FlowLimits
from kvoy_router.hedging import HedgeMode, HedgeOptions
from kvoy_router.http_client import ClientLimits
from kvoy_router.http_server import HttpLimits

_MIB = 1024 * 1024
_MAY_BE_ZERO = frozenset({"age_s", "max_held_s"})
_INTEGER = re.compile(r"-?[0-9]{1,6}")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where one engine listens: `host:port` of its HTTP and of its gRPC telemetry."""

    http: str
    telemetry: str

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        """Read `HOST:PORT` or `HOST:PORT@TELEMETRY_PORT`. Raises ValueError."""
        http, at, telemetry_port = text.removeprefix("http://").rstrip("/").partition("@")
        host, port = split_address(http)
        telemetry = _port(telemetry_port, text) if at else port + TELEMETRY_PORT_OFFSET
        return cls(f"{host}:{port}", f"{host}:{telemetry}")


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port`; an IPv6 host stands in brackets. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or (":" in host and not host.startswith("[")):
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host, _port(port, address)


def _port(text: str, whole: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(f"{whole!r}: {text!r} is not a port")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Raises ValueError, naming the field, for a value that cannot work."""

    engine: tuple[str, ...] = setting(
        (),
        help="address of an engine, HOST:PORT or HOST:PORT@TELEMETRY_PORT (its telemetry is on the "
        "HTTP port + 1000 unless told); repeatable",
        metavar="ADDRESS",
    )
    engines_file: str | None = setting(
        None,
        help="YAML file with the engines (`engines: [{address: HOST:PORT, telemetry: HOST:PORT}]`),"
        " read again whenever it changes; added to --engine",
        metavar="FILE",
    )
    kubernetes: bool = setting(
        False,
        help="find engines among the pods of a namespace, by the Kubernetes API: the account's own "
        "inside a cluster, that of the kubeconfig outside; needs --fleet-file",
    )
    kubernetes_namespace: str | None = setting(
        None,
        help="namespace of the engines' pods; the router's own, or the kubeconfig's, unless told",
        metavar="NAME",
    )
    fleet_file: str | None = setting(
        None,
        help="YAML file with the services whose pods may be used (`services: [{name: N, uid: U, "
        "model: M, secret: S, weight: W}]`), read again whenever it changes",
        metavar="FILE",
    )
    model: tuple[str, ...] = setting(
        (),
        help="name of a model that is served here even while no engine has it: requests for it get "
        "503 and Retry-After instead of 404; repeatable",
        metavar="NAME",
    )
    host: str = setting("127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    port: int = setting(DEFAULT_ROUTER_PORT, help="port of the OpenAI API")
    admin_port: int | None = setting(
        None,
        help="port for /metrics, /debug and /docs, which are then not on the main port; it has "
        "/health and /ready too",
    )
    policy: str = setting(
        "kv-aware",
        help="how an engine is chosen",
        choices=("kv-aware", "least-load", "round-robin", "random"),
    )
    secret: str = setting(
        "",
        help="the service's secret, shown to engines of --engine and --engines-file; better given "
        "as KVOY_SECRET than as a flag",
    )
    response_headers: bool = setting(
        True, help="answer with x-kvoy-engine and x-kvoy-cached-tokens"
    )
    max_retries: int = setting(
        2, help="further engines to try when one fails before the client has seen a byte"
    )
    max_resumes: int = setting(
        2,
        help="further engines that may go on with a stream whose engine has died or hangs; 0: the "
        "client is told, and engines are not asked for token ids",
    )
    max_resume_kib: int = setting(
        512,
        help="memory for the token ids of one stream, about 7 bytes each, in KiB; beyond it the "
        "stream cannot be resumed",
    )
    max_resume_memory_mib: int | None = setting(
        None,
        help="memory for the token ids of all streams together, in MiB; beyond it further ones "
        "cannot be resumed; 256, or an eighth of all memory where that is less, unless told",
    )
    hedge: str = setting(
        "off",
        help="ask a second engine too for a stream whose first byte is late, within the budget "
        "of retries: `observed` after what was predicted and the 95th percentile of how much "
        "later streams began, `fixed` after --hedge-after-s; see docs/failures.md",
        choices=tuple(HedgeMode),
    )
    hedge_after_s: float = setting(
        1.0, help="seconds until a stream is late, with --hedge fixed; at least, with observed"
    )
    hang_timeout_s: float = setting(
        3.0,
        help="seconds without a heartbeat of an engine, and without a byte of an answer, until its "
        "requests go to another one; also the least that a step may take",
    )
    retry_share: float = setting(
        0.2,
        help="retries, and likewise resumes, for each request: they stay this share of the traffic",
    )
    retry_burst: int = setting(
        1024,
        help="retries, and likewise resumes, at once: the loss of an engine with all its requests",
    )
    breaker_failures: int = setting(
        3,
        help="failures in a row after which an engine gets nothing for a while; 0: it always does",
    )
    breaker_pause_s: float = setting(
        1.0,
        help="seconds until an engine that failed so is tried again; doubled each time, up to 30",
    )
    max_engine_wait_s: float = setting(
        1.0,
        help="a request goes on while some engine would begin with it within so many seconds, and "
        "waits in the router while none would; see docs/flow-control.md",
    )
    shared_wait: float = setting(
        0.2,
        help="share of that for tenants that use more than the others, and for requests less "
        "important than some that are being served: the rest is kept free for the others",
    )
    max_waiting: int = setting(
        8192, help="requests that wait for room, for each model; 429 beyond; 0: none waits"
    )
    max_waiting_per_tenant: int = setting(8192, help="of one tenant; 429 beyond")
    max_waiting_per_priority: int = setting(8192, help="of one priority; 429 beyond")
    max_waiting_s: float = setting(300.0, help="seconds that a request waits for room; then 429")
    age_s: float = setting(
        5.0,
        help="seconds after which a less important request is served although more important ones "
        "wait: from then on such requests get --aged-share of all tokens",
    )
    aged_share: float = setting(0.125, help="that share, above 0 and up to 1")
    max_held: int = setting(256, help="requests held for the first engine of a model; 503 beyond")
    max_held_s: float = setting(10.0, help="seconds that they are held, then 503; 0: none is held")
    keys_file: str | None = setting(
        None,
        help="YAML file with the API keys that are asked of every request (`keys: [...]`, see "
        "docs/flow-control.md and `kvoy router key new`), read again whenever it changes; needs "
        "--admin-port",
        metavar="FILE",
    )
    objective: tuple[str, ...] = setting(
        (),
        help="priority of an objective that requests without API keys name in the header "
        "x-llm-d-inference-objective, NAME=PRIORITY, lower first; others have 0; repeatable",
        metavar="NAME=PRIORITY",
    )
    tls_certificate: str | None = setting(
        None,
        help="PEM file with the certificate (and its chain) of the main port, which then speaks "
        "TLS 1.2 or later alone; read again whenever it changes; needs --tls-key",
        metavar="FILE",
    )
    tls_key: str | None = setting(None, help="PEM file with its key", metavar="FILE")
    request_timeout_s: float = setting(
        600.0, help="seconds that a request may take as a whole; 504 beyond"
    )
    connect_timeout_s: float = setting(2.0, help="seconds to connect to an engine")
    first_byte_timeout_s: float = setting(
        300.0, help="seconds until an engine begins to stream; covers its queue and prefill"
    )
    whole_answer_timeout_s: float = setting(
        600.0,
        help="seconds until an engine has an answer that is not streamed: its first byte comes "
        "after its last token",
    )
    idle_timeout_s: float = setting(60.0, help="seconds of silence within an engine's answer")
    engine_keep_alive_s: float = setting(
        4.0,
        help="seconds that an unused connection to an engine is kept; below what the engines keep "
        "(5 is common)",
    )
    stale_after_s: float = setting(
        5.0,
        help="seconds without a load report until an engine counts as unknown; one a second is due",
    )
    max_reports_per_s: float = setting(
        2000.0,
        help="load reports that engines are asked to send together: the more engines, the less "
        "often each reports, down to once a second; see docs/scale.md",
    )
    memory_mib: int | None = setting(
        None,
        help="resident memory that the router keeps to, in MiB, by what it takes in: that of its "
        "container, unless told; see docs/flow-control.md",
    )
    index_mib: int | None = setting(
        None,
        help="memory for the index of what engines hold, in MiB; 256, or an eighth of all memory "
        "where that is less, unless told",
    )
    max_body_mib: int = setting(32, help="largest request body, in MiB; 413 beyond")
    max_buffered_mib: int | None = setting(
        None,
        help="memory for all requests at once and for what is made of their bodies, in MiB: what "
        "--memory-mib leaves, or a quarter of a machine without limits, up to 2048, unless told; "
        "beyond it clients wait, and get 503",
    )
    max_connections: int = setting(16384, help="client connections at once; 503 beyond")
    header_timeout_s: float = setting(
        10.0, help="seconds that a client may take to send its headers"
    )
    body_timeout_s: float = setting(
        30.0, help="seconds for a request's body, besides one second for every 16 KiB of it"
    )
    keep_alive_s: float = setting(75.0, help="seconds that an idle client connection is kept")
    drain_timeout_s: float = setting(
        30.0, help="seconds that running requests get after SIGTERM before they are cut"
    )
    decisions_kept: int = setting(1000, help="routing decisions that /debug/decisions remembers")
    log_level: str = setting(
        "info", help="least level to log", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting("text", help="one line per event", choices=FORMATS)

    def __post_init__(self) -> None:
        if not self.engine and self.engines_file is None and not self.kubernetes:
            raise ValueError(
                "engine: give at least one --engine, an --engines-file, or --kubernetes"
            )
        if self.kubernetes and self.fleet_file is None:
            raise ValueError("fleet_file: --kubernetes needs it, to know whose pods to trust")
        for name in ("kubernetes_namespace", "fleet_file"):
            if getattr(self, name) is not None and not self.kubernetes:
                raise ValueError(f"{name}: counts only with --kubernetes")
        for text in self.engine:
            try:
                EngineAddress.parse(text)
            except ValueError as error:
                raise ValueError(f"engine: {error}") from None
        try:
            check_secret(self.secret)
        except ValueError as error:
            raise ValueError(f"secret: {error}") from None
        for name in ("port", "admin_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 65536:
                raise ValueError(f"{name}: {port} is not a port")
        if self.admin_port and self.admin_port == self.port:
            raise ValueError("admin_port: must differ from port")
        for field in fields(self):
            value = getattr(self, field.name)
            least_ok = field.name in _MAY_BE_ZERO and value == 0
            if field.name.endswith("_s") and not least_ok and not (0 < value < math.inf):
                raise ValueError(f"{field.name}: must be above 0, not {value:g}")
            if field.name.endswith("_mib") and value is not None and value < 1:
                raise ValueError(f"{field.name}: must be at least 1, not {value}")
        _ = self.flow_limits, self.objectives
        if self.keys_file is not None and self.admin_port is None:
            raise ValueError(
                "keys_file: needs --admin-port, or /metrics and /debug stand open beside it"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate, tls_key: give both or none")
        if not 0 <= self.retry_share <= 1:
            raise ValueError(f"retry_share: must be from 0 to 1, not {self.retry_share:g}")
        for name, least in (
            ("max_retries", 0),
            ("max_resumes", 0),
            ("max_resume_kib", 1),
            ("retry_burst", 0),
            ("breaker_failures", 0),
            ("max_connections", 1),
            ("decisions_kept", 0),
            ("max_reports_per_s", 1),
        ):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name}: must be at least {least}, not {value}")

    @property
    def engines(self) -> tuple[EngineAddress, ...]:
        return tuple(EngineAddress.parse(text) for text in self.engine)

    @property
    def flow_limits(self) -> FlowLimits:
        return FlowLimits(**{field.name: getattr(self, field.name) for field in fields(FlowLimits)})

    @property
    def hedge_options(self) -> HedgeOptions:
        return HedgeOptions(HedgeMode(self.hedge), self.hedge_after_s)

    @property
    def objectives(self) -> dict[str, int]:
        """Raises ValueError."""
        found = {}
        for text in self.objective:
            name, _, priority = text.rpartition("=")
            if not name or not _INTEGER.fullmatch(priority):
                raise ValueError(f"objective: {text!r} is not NAME=PRIORITY")
            found[name] = int(priority)
        return found

    @property
    def http_limits(self) -> HttpLimits:
        return HttpLimits(
            max_connections=self.max_connections,
            max_body_bytes=self.max_body_mib * _MIB,
            head_s=self.header_timeout_s,
            body_s=self.body_timeout_s,
            keep_alive_s=self.keep_alive_s,
        )

    @property
    def client_limits(self) -> ClientLimits:
        return ClientLimits(
            connect_s=self.connect_timeout_s,
            first_byte_s=self.first_byte_timeout_s,
            whole_answer_s=self.whole_answer_timeout_s,
            idle_s=self.idle_timeout_s,
            keep_alive_s=self.engine_keep_alive_s,
        )
