"""What one request came to: filled along its way, read once for the log line and the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from kvoy_contract.tracing import Span
from kvoy_router.access import ANYBODY, Client
from kvoy_router.decision import Decision


@dataclass(slots=True, eq=False)
class RequestRecord:
    request_id: str
    path: str
    started_s: float
    model: str = ""
    """Empty until the model is known to exist: a client's free text becomes no label."""
    client: Client = ANYBODY
    is_charged: bool = False
    """Whether it was counted against its key's limits."""
    is_stream: bool = False
    engine: str = ""
    policy: str = ""
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    decision: Decision | None = None
    """The last one."""
    cached_tokens: int | None = None
    """As the engine counted them; None where it does not say."""
    output_tokens: int | None = None
    """As the engine counted them; None where it does not say."""
    queued_s: float = 0.0
    """Until an engine had room."""
    first_byte_s: float | None = None
    num_retries: int = 0
    num_resumes: int = 0
    """Engines that went on with the stream of one that failed."""
    outcome: str = "ok"
    status: int = 0
    span: Span | None = None
    """Its trace; None where there are none."""

    def ttft_s(self) -> float | None:
        return None if self.first_byte_s is None else self.first_byte_s - self.started_s

    def log_fields(self, now_s: float) -> dict[str, object]:
        ttft_s = self.ttft_s()
        return {
            "request_id": self.request_id,
            "path": self.path,
            "model": self.model,
            "tenant": self.client.tenant,
            "engine": self.engine,
            "policy": self.policy,
            "stream": self.is_stream,
            "prompt_tokens": self.prompt_tokens,
            "predicted_cached_tokens": self.predicted_cached_tokens,
            "cached_tokens": self.cached_tokens,
            "status": self.status,
            "outcome": self.outcome,
            "retries": self.num_retries,
            "resumes": self.num_resumes,
            "output_tokens": self.output_tokens,
            "queued_s": round(self.queued_s, 4),
            "ttft_s": None if ttft_s is None else round(ttft_s, 4),
            "duration_s": round(now_s - self.started_s, 4),
        }
