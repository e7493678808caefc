"""How long a step of a simulated engine takes: a pure function of the batch.

    seconds = base + prefill tokens / rate + context tokens read x cost + sequences x cost

The defaults are those of an 8-billion-parameter model on one large accelerator: 14 ms for reading
the weights, 16,000 prompt tokens per second, 55 ns for each token of context that a row attends to.
They give the ratios by which routing policies differ, not the absolute speed of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoy_engine.batch import Batch


@dataclass(frozen=True, slots=True)
class TimingModel:
    """Raises ValueError, naming the field, when a value cannot work."""

    base_s: float = 0.014
    """Every step."""
    prefill_tokens_per_s: float = 16_000.0
    """Rows of more than one token, and those of one that sample nothing, are prefill; other rows
    decode and add nothing here."""
    context_token_s: float = 55e-9
    """Per token of context read: the end position of every row."""
    row_s: float = 0.0
    """Per row, as for sampling."""

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_s <= 0:
            raise ValueError(f"prefill_tokens_per_s must be above 0: {self.prefill_tokens_per_s}")
        for name in ("base_s", "context_token_s", "row_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")

    def duration_s(self, batch: Batch) -> float:
        prefill_tokens = context = 0
        for row in batch.rows:
            num_tokens = len(row.token_ids)
            context += row.start + num_tokens
            if num_tokens > 1 or not row.samples:
                prefill_tokens += num_tokens
        return (
            self.base_s
            + prefill_tokens / self.prefill_tokens_per_s
            + context * self.context_token_s
            + len(batch.rows) * self.row_s
        )
