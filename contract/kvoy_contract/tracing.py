"""OpenTelemetry spans of requests, the same in router and engine.

`start_tracing` gives None unless the standard variables ask for an export, and only then is the SDK
imported. Spans get their times from the component's own clock, and most are made
when what they tell of is over, so a token or a chunk never costs anything. Nothing of a prompt, an
answer or a key may become an attribute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "http/protobuf"
CONTEXT_HEADERS = frozenset({b"traceparent", b"tracestate"})

Headers = Iterable[tuple[bytes, bytes]]
Attributes = Mapping[str, str | bool | int | float | Sequence[str] | None]
"""None stands for what is not known: it is left out."""
Kind = Literal["internal", "server", "client"]
_CLOSE_S = 3.0


class TracingUnavailable(Exception):
    """The environment asks for spans that cannot be exported; the message is for people."""


def start_tracing(
    service: str, environ: Mapping[str, str], clock: Callable[[], float]
) -> Tracing | None:
    """`service` is the default of `OTEL_SERVICE_NAME`; `clock` is what span times are given by,
    in seconds. Raises TracingUnavailable.
    """
    variable = next((name for name in (TRACES_ENDPOINT, ENDPOINT) if environ.get(name)), None)
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if variable is None or is_disabled or exporter == "none":
        return None
    if exporter != "otlp":
        raise TracingUnavailable(f"OTEL_TRACES_EXPORTER: {exporter!r} is neither otlp nor none")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(name):
            if protocol != PROTOCOL:
                raise TracingUnavailable(f"{name}: {protocol!r} is not {PROTOCOL}")
            break
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingUnavailable(
            f"{variable} is set, but {error.name} is not installed: install kvoy[tracing], "
            "or set OTEL_TRACES_EXPORTER=none"
        ) from None
    is_named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if is_named else {"service.name": service})
    # The sampler, the limits and the batches come from the standard variables.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, clock)


class Tracing:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider, clock: Callable[[], float]) -> None:
        from opentelemetry import trace as otel
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("kvoy")
        self._kinds = {
            "internal": otel.SpanKind.INTERNAL,
            "server": otel.SpanKind.SERVER,
            "client": otel.SpanKind.CLIENT,
        }

    def receive(self, name: str, headers: Headers, start_s: float) -> Span:
        """A request's own span, below the one that its headers name. Whether it is recorded says
        the sampler, by default the sender's choice; what is below it does the same."""
        carrier: dict[str, str] = {}
        for key, value in headers:
            if key in CONTEXT_HEADERS:
                known = carrier.get(key.decode())
                text = value.decode("latin-1")
                # Two parents are none; the state may come in parts.
                carrier[key.decode()] = text if known is None else f"{known},{text}"
        offset_ns = self._unix_offset_ns()
        return self._start(name, self._propagator.extract(carrier), "server", start_s, offset_ns)

    def close(self) -> None:
        """Export what is left, within seconds. Blocks."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)  # a collector that does not answer holds up nobody's end

    def child(
        self, parent: otel.Span, name: str, kind: Kind, start_s: float, offset_ns: int
    ) -> Span:
        from opentelemetry import trace as otel

        return self._start(name, otel.set_span_in_context(parent), kind, start_s, offset_ns)

    def _start(
        self, name: str, context: Context, kind: Kind, start_s: float, offset_ns: int
    ) -> Span:
        span = self._tracer.start_span(
            name, context, kind=self._kinds[kind], start_time=unix_ns(start_s, offset_ns)
        )
        return Span(self, span, offset_ns)

    def _unix_offset_ns(self) -> int:
        """Unix time less the component's clock. A process may be put aside between two looks at
        clocks, so of some pairs the closest one counts."""
        looks = []
        for _ in range(3):
            before_s, now_ns, after_s = self._clock(), time.time_ns(), self._clock()
            looks.append((after_s - before_s, now_ns - round((before_s + after_s) * 0.5e9)))
        return min(looks)[1]

    def context_headers(self, span: otel.Span) -> list[tuple[bytes, bytes]]:
        from opentelemetry import trace as otel

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, otel.set_span_in_context(span))
        return [(key.encode(), value.encode("latin-1")) for key, value in carrier.items()]


class Span:
    """One span. Of a request that is not recorded every span is this same one, which remembers
    nothing and still tells the next component so. Times are on the component's clock."""

    __slots__ = ("_offset_ns", "_span", "_tracing", "is_recording")

    def __init__(self, tracing: Tracing, span: otel.Span, offset_ns: int) -> None:
        self._tracing = tracing
        self._span = span
        self._offset_ns = offset_ns
        """Of a whole request the same, so that its spans fit together."""
        self.is_recording = span.is_recording()

    def child(self, name: str, start_s: float, kind: Kind = "internal") -> Span:
        if not self.is_recording:
            return self
        return self._tracing.child(self._span, name, kind, start_s, self._offset_ns)

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes = {},  # noqa: B006 (never written)
    ) -> None:
        """A child that is over."""
        if self.is_recording:
            child = self.child(name, start_s)
            child.set(attributes)
            child.end(end_s)

    def set(self, attributes: Attributes) -> None:
        if self.is_recording:
            known = {key: value for key, value in attributes.items() if value is not None}
            self._span.set_attributes(known)

    def event(self, name: str, at_s: float) -> None:
        """A moment in it."""
        if self.is_recording:
            self._span.add_event(name, timestamp=unix_ns(at_s, self._offset_ns))

    def fail(self, error_type: str) -> None:
        """It ends in an error of this kind; a message might quote what nobody should see."""
        if self.is_recording:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error_type)
            self._span.set_status(StatusCode.ERROR)

    def end(self, end_s: float) -> None:
        if self.is_recording:
            self._span.end(unix_ns(end_s, self._offset_ns))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`traceparent` and `tracestate` for whoever is asked next."""
        return self._tracing.context_headers(self._span)


def unix_ns(at_s: float, offset_ns: int) -> int:
    return round(at_s * 1e9) + offset_ns


def gen_ai(operation: str, model: str, *, is_stream: bool) -> dict[str, str | bool | None]:
    """What a span of a generating request says of it, by the semantic conventions; `model` is
    empty where it is not known."""
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kvoy",
        "gen_ai.request.model": model or None,
        "gen_ai.request.stream": is_stream,
    }


def operation_of(path: str) -> str:
    """The conventions' name of a generating endpoint."""
    return "chat" if path.endswith("/chat/completions") else "text_completion"
