"""The messages that cross the core's boundary, in both directions: plain serialisable values.

The server side (HTTP, text, telemetry) knows strings; the core knows token ids. Whether the core
runs in a thread or in a process of its own, these are the only things that pass between them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from kvoy_contract.blocks import BlockHash


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """A stop token was sampled (it is the last of the token ids)."""
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorKind(enum.StrEnum):
    """Why a request ends with `FinishReason.ERROR`; the server gives each its HTTP status."""

    TOO_LONG = "too_long"
    """It can never fit the model's context or the whole KV cache."""
    SATURATED = "saturated"
    """The queue is full; later it may be taken."""
    BROKEN = "broken"
    """The computation failed for this request alone; elsewhere it may work."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How to continue one sequence. Validated at the server; the core trusts it."""

    max_tokens: int
    min_tokens: int = 0
    """Before so many output tokens no id of `stop_token_ids` or `eos_token_ids` is sampled."""
    temperature: float = 1.0
    """0.0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """The first two count output tokens, this one prompt and output tokens."""
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """Number of alternatives to report per output token; 0 reports the sampled token alone."""
    prompt_logprobs: int | None = None
    """The same for every prompt token; such a prompt is computed whole, never from the cache."""
    seed: int = 0
    """64 bits. A random number depends on (seed, choice, position) and nothing else."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the sequence. The server puts the model's end tokens here, unless
    `ignore_eos`."""
    banned_token_ids: tuple[int, ...] = ()
    """Ids that are never sampled."""


class ChoiceStart(msgspec.Struct, frozen=True, array_like=True):
    """One choice of a request; `output_ids` is not empty when it began on another engine."""

    index: int
    output_ids: list[int] = []


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    request_id: str
    """Unique among the live requests of this engine."""
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed_hash: bytes
    """`blocks.seed_hash` of model, adapter and salt."""
    choices: list[ChoiceStart]
    arrival_s: float = 0.0
    """On the core's clock."""
    priority: int = 0
    """Lower runs first."""
    router_id: str = ""
    number: int = 0
    """The router's number of this request; see `envelope.Envelope`."""
    known_hashes: list[BlockHash] | None = None
    """Of all full blocks of prompt and longest answer, for a caller that knows them without tokens,
    as a simulation does; None: the core makes them from the ids."""


class AbortRequest(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Ends a request or, with `choice`, one of its choices. Unknown ids are ignored: they ended."""

    request_id: str
    choice: int | None = None


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """Forget all cached work that no running sequence uses."""


Command = AddRequest | AbortRequest | ResetPrefixCache


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    """Natural logarithm, of the distribution before temperature and penalties."""
    top: list[tuple[int, float]] = []
    """(token id, logprob) of the most likely alternatives, best first."""


class TokensOut(msgspec.Struct, frozen=True, array_like=True):
    """What one step made for one choice. `finish_reason` is set exactly once, in the last one."""

    request_id: str
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed for this choice; known from its first tokens on."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Once, with the first tokens of choice 0; the first prompt token has None."""
    error: str | None = None
    """With `FinishReason.ERROR`: what went wrong."""
    num_preemptions: int = 0
    queue_time_s: float = 0.0
    """From arrival to first being scheduled."""
    error_kind: ErrorKind | None = None
    """Set together with `error`."""


class BlockEvents(msgspec.Struct, frozen=True, array_like=True):
    """Changes of the reported hashes since the last step; apply cleared, removed, stored."""

    removed: list[bytes] = []
    stored: list[bytes] = []
    cleared: bool = False

    def __bool__(self) -> bool:
        return bool(self.removed or self.stored or self.cleared)


class Load(msgspec.Struct, frozen=True, array_like=True):
    """The core's own numbers after a step. Fields as in `telemetry.proto`'s LoadReport."""

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    free_blocks: int = 0
    evictable_blocks: int = 0
    total_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    step_time_s: float = 0.0
    running_tokens: int = 0
    num_preemptions: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """Computed or cached, since start."""
    cached_tokens: int = 0
    """Prompt tokens served from the cache since start; own recomputation does not count."""
    num_steps: int = 0


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    now_s: float
    """On the core's clock, at the end of the step."""
    tokens: list[TokensOut]
    events: BlockEvents
    load: Load
    admitted: list[tuple[str, int]] = []
    """(router_id, number) of the requests that `load` includes for the first time."""
    step_s: float = 0.0
    num_batched_tokens: int = 0
    num_decodes: int = 0
