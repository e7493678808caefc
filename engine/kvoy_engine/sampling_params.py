"""A client's checked request to the core's `SamplingParams`, or to the error naming the field.

Pure. Ranges were checked by the contract; here is what needs the model: its context, its
vocabulary, its end tokens and its own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvoy_contract.errors import BadRequest, ContextLengthExceeded
from kvoy_contract.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    MinP,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from kvoy_engine.messages import SamplingParams

N = TypeVar("N", int, float)
SEED_MASK = (1 << 64) - 1


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a model samples with unless a request says otherwise."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """Of a model's `generation_config.json`. Raises ValueError with the field out of its range.

        `do_sample` is left aside: clients of this API expect sampling unless told otherwise.
        """
        given = {name: value for name, value in config.items() if value is not None}
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"generation_config.json: {error}") from None


NO_DEFAULTS = SamplingDefaults()
"""Of a model that says nothing."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request must keep to."""

    max_model_len: int
    """Tokens of prompt and completion together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults = NO_DEFAULTS


def sampling_params(
    request: GenerationRequest, num_prompt_tokens: int, limits: ModelLimits, seed: int
) -> SamplingParams:
    """Raises BadRequest or ContextLengthExceeded with the name of the field."""
    biases = request.token_biases
    check_token_ids(biases, limits.vocab_size, "logit_bias")
    check_token_ids(request.stop_token_ids, limits.vocab_size, "stop_token_ids")
    max_tokens = output_limit(request, num_prompt_tokens, limits.max_model_len)
    if request.min_tokens > max_tokens:
        raise BadRequest(
            f"`min_tokens` is {request.min_tokens}, but only {max_tokens} tokens can follow the "
            "prompt.",
            param="min_tokens",
        )
    end_ids = () if request.ignore_eos else limits.eos_token_ids
    defaults = limits.defaults
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=_given(request.temperature, defaults.temperature),
        top_p=_given(request.top_p, defaults.top_p),
        top_k=max(0, _given(request.top_k, defaults.top_k)),
        min_p=_given(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=biases,
        logprobs=request.num_logprobs,
        prompt_logprobs=_prompt_logprobs(request),
        seed=seed & SEED_MASK,
        stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *end_ids))),
    )


def output_limit(request: GenerationRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """Output tokens at most: as asked, or what the context leaves."""
    room = max_model_len - num_prompt_tokens
    asked = request.output_limit
    if room < (1 if asked is None else min(asked, 1)):
        raise ContextLengthExceeded(
            f"This model's context holds {max_model_len} tokens, but the prompt has "
            f"{num_prompt_tokens}. Shorten the prompt.",
            param="messages" if isinstance(request, ChatCompletionRequest) else "prompt",
        )
    if asked is None:
        return room
    if asked > room:
        raise ContextLengthExceeded(
            f"This model's context holds {max_model_len} tokens, but {num_prompt_tokens + asked} "
            f"were asked for: {num_prompt_tokens} of the prompt and {asked} of the completion.",
            param=_output_limit_name(request),
        )
    return asked


def check_token_ids(token_ids: Mapping[int, Any] | Sequence[int], size: int, param: str) -> None:
    """Raises BadRequest for an id outside the vocabulary of `size` ids."""
    for token_id in token_ids:
        if not 0 <= token_id < size:
            raise BadRequest(
                f"`{param}` has the token id {token_id}, outside the vocabulary of {size} ids.",
                param=param,
            )


def _prompt_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest) and request.echo:
        return request.logprobs
    return None


def _output_limit_name(request: GenerationRequest) -> str:
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "max_tokens"


def _given(value: N | None, default: N) -> N:
    return default if value is None else value
