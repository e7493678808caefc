"""What a request's spans say in an engine. They are made when it is over.

POST /v1/chat/completions   server; below the router's attempt
  queue                     until the core turned to it
  prefill                   until its first token
  decode                    until its answer was complete"""

from __future__ import annotations

from kvoy_contract.tracing import Headers, Tracing, gen_ai, operation_of
from kvoy_engine.generation import Generation


def record(
    tracing: Tracing,
    path: str,
    headers: Headers,
    *,
    start_s: float,
    end_s: float,
    outcome: str,
    is_stream: bool,
    request_id: str,
    model: str,
    generation: Generation | None,
) -> None:
    """A request that is over. `outcome` is `success`, `aborted`, `refused`, `unavailable` or
    `error`; `generation` is None for one that never reached the core."""
    span = tracing.receive(f"POST {path}", headers, start_s)
    if not span.is_recording:
        return
    span.set(
        {
            "http.request.method": "POST",
            "http.route": path,
            **gen_ai(operation_of(path), model, is_stream=is_stream),
            "kvoy.request.id": request_id,
            "kvoy.outcome": outcome,
        }
    )
    if generation is not None:
        usage = generation.usage
        span.set(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": generation.num_cached_tokens,
            }
        )
        queue_s, first_token_s = generation.queue_time_s, generation.first_token_s
        if queue_s is not None:
            begun_s = generation.arrival_s + queue_s
            span.add("queue", generation.arrival_s, begun_s)
            prefilled_s = end_s if first_token_s is None else first_token_s
            span.add("prefill", begun_s, prefilled_s)
            if first_token_s is not None:
                span.add(
                    "decode",
                    first_token_s,
                    end_s,
                    {"kvoy.new_tokens": generation.num_new_tokens},
                )
        elif not generation.is_finished:
            span.add("queue", generation.arrival_s, end_s)  # it never got further
    if outcome in ("error", "unavailable"):
        span.fail(outcome)
    span.end(end_s)
