"""What a request's spans say in a router: called at its turning points, never per chunk.

POST /v1/chat/completions   server
  receive                   parsed, rendered, tokenised
  queue                     only where it had to wait
  decide                    engine, policy, predicted cached tokens, the cost's terms
  attempt | resume          client; the engine's own span is below it
  decide, attempt, ...      after a failure"""

from __future__ import annotations

from kvoy_contract.tracing import Span, Tracing, gen_ai, operation_of
from kvoy_router.decision import Decision
from kvoy_router.http_message import Request
from kvoy_router.record import RequestRecord


def begin(tracing: Tracing, request: Request, record: RequestRecord) -> Span:
    """The request's own span, for `RequestRecord.span`."""
    return tracing.receive(f"POST {record.path}", request.headers, record.started_s)


def end(record: RequestRecord, now_s: float) -> None:
    """Everything that the record says by now."""
    span = record.span
    if span is None or not span.is_recording:
        return
    span.set(
        {
            "http.request.method": "POST",
            "http.route": record.path,
            "http.response.status_code": record.status or None,
            **gen_ai(operation_of(record.path), record.model, is_stream=record.is_stream),
            "gen_ai.response.time_to_first_chunk": record.ttft_s(),
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "kvoy.request.id": record.request_id,
            "kvoy.tenant": record.client.tenant or None,
            "kvoy.outcome": record.outcome,
            "kvoy.engine": record.engine or None,
            "kvoy.retries": record.num_retries,
            "kvoy.resumes": record.num_resumes,
        }
    )
    is_refused = 400 <= record.status < 500
    if record.outcome not in ("ok", "client_gone") and not is_refused:
        span.fail(record.outcome)
    span.end(now_s)


def received(record: RequestRecord, now_s: float) -> None:
    """The prompt is read and tokenised."""
    if record.span is not None:
        record.span.add(
            "receive",
            record.started_s,
            now_s,
            {"gen_ai.usage.input_tokens": record.prompt_tokens},
        )


def waited(record: RequestRecord, came_s: float, now_s: float) -> None:
    if record.span is not None:
        record.span.add("queue", came_s, now_s)


def decided(record: RequestRecord, decision: Decision, now_s: float) -> None:
    """An engine is picked."""
    if record.span is None or not record.span.is_recording:
        return
    attributes: dict[str, str | float | int | None] = {
        "kvoy.policy": decision.policy,
        "kvoy.engine": decision.endpoint.name,
        "kvoy.service": decision.endpoint.origin.service or None,
        "kvoy.cached_tokens.predicted": decision.cached_tokens,
        "kvoy.cached_tokens.best": decision.best_cached_tokens,
        "kvoy.time_to_first_token.predicted_s": decision.predicted_ttft_s,
        "kvoy.candidates": len(decision.candidates),
        "kvoy.rejected": len(decision.rejected),
    }
    costs = (c.cost for c in decision.candidates if c.endpoint_id == decision.endpoint.id)
    if (cost := next(costs, None)) is not None:
        for term in ("total", "wait", "prefill", "decode", "harm", "evict"):
            attributes[f"kvoy.cost.{term}_s"] = getattr(cost, f"{term}_s")
    record.span.add("decide", decision.now_s, now_s, attributes)


def begin_attempt(
    record: RequestRecord, decision: Decision, resumed_tokens: int | None, now_s: float
) -> Span | None:
    """One try at one engine; `resumed_tokens`: what its client has had from another, if any."""
    if record.span is None:
        return None
    name = "attempt" if resumed_tokens is None else "resume"
    span = record.span.child(name, now_s, "client")
    host, _, port = decision.endpoint.address.rpartition(":")
    span.set(
        {
            "http.request.method": "POST",
            "server.address": host.strip("[]"),
            "server.port": int(port),
            "kvoy.engine": decision.endpoint.name,
            "kvoy.resume.output_tokens": resumed_tokens,
        }
    )
    return span


def end_attempt(
    span: Span | None, first_byte_s: float | None, why: str | None, now_s: float
) -> None:
    """`why`: what went wrong, None for an answer that its client has."""
    if span is None or not span.is_recording:
        return
    if first_byte_s is not None:
        span.event("first byte", first_byte_s)
    if why is not None:
        span.fail(why)
    span.end(now_s)
