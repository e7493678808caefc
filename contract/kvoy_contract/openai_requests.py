"""The bodies that clients of the OpenAI API send, as strict values.

These are shapes, ranges and derived views; `openai_parse` turns bytes into them and refuses by name
what is not here. Field names and meanings are OpenAI's, and vLLM's where OpenAI has none. A value
that exists has passed all checks that need no tokenizer: `prompt.PromptEncoder` checks token ids.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_PROMPTS = 2048
MAX_SEQUENCES = 2048
"""Of one request: its prompts times its choices."""
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_CHARS = 1024
MAX_BIASED_TOKENS = 1024

Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TokenCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
# Bounded on both sides, so that no logit can overflow by it.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100.0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
# Templates know roles of their own ("ipython", "context"), so the template judges the name.
Role = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}\Z")]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    """A last chunk without choices carries the usage."""
    continuous_usage_stats: bool = False
    """Every chunk carries the usage so far."""
    include_obfuscation: bool = False
    """Accepted and without effect: chunks are not padded."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the two generating endpoints have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Choices = 1
    max_tokens: TokenCount | None = None
    """Output tokens at most; None: as many as the context holds."""
    min_tokens: TokenCount = 0
    temperature: Temperature | None = None
    """None: the model's own default, else 1."""
    top_p: TopP | None = None
    top_k: TopK | None = None
    """0 and -1: no limit."""
    min_p: MinP | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_BIASED_TOKENS)] = []
    ignore_eos: bool = False
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: CacheSalt | None = None
    """Requests with different salts never share a cached block."""
    priority: Priority = 0
    """Lower runs first."""
    # OpenAI's bookkeeping fields: accepted, without effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def output_limit(self) -> int | None:
        """Output tokens at most, under whichever name the client gave it."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per output token; None: no logprobs at all."""
        return None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    @property
    def token_biases(self) -> dict[int, float]:
        """`logit_bias` by token id; parsing has checked that every key is a token id."""
        return {int(key): bias for key, bias in (self.logit_bias or {}).items()}


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A part of a message's content; only text parts exist."""

    type: str
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat; an assistant's answer comes back as the client received it."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """The thinking before an assistant's answer, for templates that render it."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    # Parts of answers that this server never gives; parsing refuses them unless they are empty.
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    annotations: list[Any] | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Leave the last message open, so that the answer goes on from its end."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template, such as `enable_thinking`."""

    @property
    def output_limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | int | list[int]], Meta(max_length=2**24)]
    """A text, texts, token ids, or lists of token ids; never a mixture."""
    logprobs: LogprobCount | None = None
    echo: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one entry each: all texts or all token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # Parsing has checked that all are of one kind, and there may be millions of ids.
        if self.prompt and isinstance(self.prompt[0], int):
            return [cast(list[int], self.prompt)]
        return cast(list[str] | list[list[int]], self.prompt)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either a `prompt` or the `messages` of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    """Of a `prompt`: with the beginning-of-text token. A chat has what its template writes."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    def as_chat(self) -> ChatCompletionRequest:
        """The chat whose prompt this asks for; only where `messages` are given."""
        assert self.messages is not None
        return ChatCompletionRequest(
            model=self.model or "",
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: Annotated[list[TokenId], Meta(max_length=2**24)]
    model: str | None = None
