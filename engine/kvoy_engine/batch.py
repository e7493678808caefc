"""What one step computes: rows of token ids and block tables, and what comes back. No tensors.

`Batch` is the one product that the scheduler hands to a runner, and `RunnerOutput` the one that
comes back. Both are serialisable values, so a runner may sit in other processes (tensor and
pipeline ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvoy_engine.messages import SamplingParams, TokenLogprob


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: its tokens `[start, start + num_tokens)`.

    A decode has one token; a prefill chunk has many. KV of tokens before `start` is in the blocks.
    """

    seq_id: int
    """Unique for the life of the engine; one per choice."""
    token_ids: Sequence[int]
    """(num_tokens,) ids to compute."""
    start: int
    """Position of the first of them."""
    block_table: Sequence[int]
    """Block ids that hold positions 0 .. start + num_tokens - 1, and perhaps more."""
    samples: bool
    """Whether the last token's logits yield a new token (false for an inner prefill chunk)."""
    params: SamplingParams
    choice: int
    prompt_ids: Sequence[int]
    """The whole prompt, for penalties; shared, never changed."""
    output_ids: Sequence[int]
    """What was generated so far, for penalties and positions of random numbers; len() is the
    position of the token that this row samples."""
    wants_prompt_logprobs: bool = False
    """Report logprobs for those of the tokens `start + 1 .. start + num_tokens` that lie in the
    prompt."""
    request_id: str = ""
    """For error messages and fault hooks alone."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    rows: Sequence[Row]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_decodes(self) -> int:
        return sum(1 for row in self.rows if len(row.token_ids) == 1 and row.samples)


class RowOutput(msgspec.Struct, frozen=True, gc=False):
    """One row's result, in the order of the batch's rows."""

    token_id: int | None = None
    """The sampled id; None when the row does not sample or failed."""
    logprob: TokenLogprob | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """For prompt tokens start + 1 .. : entry j belongs to prompt position start + 1 + j."""
    error: str | None = None
    """This row alone is broken (logits are not finite): its request ends, its blocks are not kept.
    """


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    rows: Sequence[RowOutput]
    duration_s: float = 0.0
    """How long the step took, on the runner's clock; the pace model learns from it."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a loaded runner says of itself."""

    num_blocks: int
    block_size: int
    block_bytes: int
    vocab_size: int
    max_model_len: int
    numerics: str
    """Digest of dtype, kernels, instruction set and parallel shape."""
    weights_bytes: int = 0
    free_device_bytes: int = 0
    details: dict[str, str] = field(default_factory=dict)
    """For people: the chosen kernels and formats with the measurements behind the choice."""


class Runner(Protocol):
    """Turns a batch into tokens. The torch model and the timing model are the two runners."""

    @property
    def info(self) -> RunnerInfo: ...

    def run(self, batch: Batch) -> RunnerOutput:
        """Compute one step. Raises only when the whole engine is broken; see RowOutput.error."""
        ...

    def free_device_bytes(self) -> int: ...

    def close(self) -> None: ...
