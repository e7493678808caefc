"""A collector of spans for tests: an HTTP server that takes what OTLP exporters send."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """One span as it was sent; times in nanoseconds of Unix time."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    is_error: bool


@dataclass(slots=True, eq=False)
class Collector:
    url: str
    """For `OTEL_EXPORTER_OTLP_ENDPOINT`."""
    spans: list[SeenSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def named(self, name: str, service: str | None = None) -> list[SeenSpan]:
        return [s for s in self.spans if s.name == name and service in (None, s.service)]

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                self.spans += [_seen(str(resource["service.name"]), s) for s in scope_spans.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_known = self.path == "/v1/traces"
            if is_known:
                collector.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if is_known else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            """Nobody wants to read it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _seen(service: str, span: Any) -> SeenSpan:
    return SeenSpan(
        service=service,
        name=span.name,
        kind=span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        is_error=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
