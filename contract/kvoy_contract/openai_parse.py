"""From a client's bytes to a checked request, or to a `BadRequest` that names the wrong field.

The first decode is the fast path: one pass of a strict decoder. Only when it fails is the body
looked at field by field, to accept what is inert (`null` for "not given", `"tools": []`) and to say
of a known feature that it is not supported instead of calling it unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kvoy_contract.body_shape import check_shape
from kvoy_contract.errors import BadRequest
from kvoy_contract.openai_requests import (
    MAX_PROMPTS,
    MAX_SEQUENCES,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
)

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key` in `)?\$(?P<path>[^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<field>.*)`$", re.DOTALL)
_DIGITS = re.compile(r"[0-9]{1,10}")
_OUT_OF_RANGE = re.compile("(Number|Integer value) out of range")
_MAX_ARGUMENT_DEPTH = 64


def _never(value: object) -> bool:
    return False


def _is_empty(value: object) -> bool:
    return value is False or value in ([], {}, "")


def _is(*accepted: str) -> Callable[[object], bool]:
    return lambda value: value in accepted


# Known fields that are not supported, each with the test for values that ask for nothing.
_UNSUPPORTED: dict[str, Callable[[object], bool]] = {
    "audio": _never,
    "best_of": _never,
    "chat_template": _never,
    "documents": _is_empty,
    "function_call": _is("none"),
    "functions": _is_empty,
    "guided_choice": _never,
    "guided_decoding_backend": _never,
    "guided_grammar": _never,
    "guided_json": _never,
    "guided_regex": _never,
    "kv_transfer_params": _never,
    "include_reasoning": lambda value: value is True,
    "length_penalty": lambda value: value == 1.0,
    "modalities": lambda value: value == ["text"],
    "mm_processor_kwargs": _is_empty,
    "no_stop_trim": _is_empty,
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "prediction": _never,
    "prompt_embeds": _never,
    "prompt_logprobs": _never,
    "reasoning_effort": _is("none"),
    "response_format": lambda value: value == {"type": "text"},
    "resume": _never,
    "return_hidden_states": _is_empty,
    "separate_reasoning": lambda value: value is True,
    "spaces_between_special_tokens": lambda value: value is True,
    "store": _is_empty,
    "stream_reasoning": lambda value: value is True,
    "structured_outputs": _never,
    "suffix": _is_empty,
    "tool_choice": _is("none", "auto"),
    "tools": _is_empty,
    "truncate_prompt_tokens": _never,
    "use_beam_search": _is_empty,
    "verbosity": _never,
    "web_search_options": _never,
}
_UNSUPPORTED_PARTS = frozenset(
    {"image_url", "image", "input_audio", "audio_url", "video_url", "video", "file", "refusal"}
)

_chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def parse_chat(body: bytes) -> ChatCompletionRequest:
    """The body of `/v1/chat/completions`. Raises BadRequest with `param`."""
    request = _decode(body, _chat_decoder)
    _check_messages(request.messages)
    _check_generation(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    if request.output_limit == 0:
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        raise BadRequest(f"`{name}` must be at least 1.", param=name)
    _check_continuation(request.add_generation_prompt, request.continue_final_message)
    _check_depth(request.chat_template_kwargs)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """The body of `/v1/completions`. Raises BadRequest with `param`."""
    request = _decode(body, _completion_decoder)
    _check_prompt(request.prompt)
    _check_generation(request)
    if request.output_limit == 0 and not request.echo:
        raise BadRequest("`max_tokens` 0 needs `echo` to be true.", param="max_tokens")
    if request.n * len(request.prompts) > MAX_SEQUENCES:
        raise BadRequest(
            f"{len(request.prompts)} prompts with {request.n} choices each are more than "
            f"{MAX_SEQUENCES} completions.",
            param="n",
        )
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """The body of `/tokenize`. Raises BadRequest with `param`."""
    request = _decode(body, _tokenize_decoder)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("Exactly one of `prompt` and `messages` is needed.", param="prompt")
    if request.messages is not None:
        _check_messages(request.messages)
        _check_continuation(request.add_generation_prompt, request.continue_final_message)
        _check_depth(request.chat_template_kwargs)
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """The body of `/detokenize`. Raises BadRequest with `param`."""
    return _decode(body, _detokenize_decoder)


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    check_shape(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raw = _decode_untyped(body, decoder.type)
        if not isinstance(raw, dict) or not _drop_inert(raw):
            raise _bad_field(error) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _not_json(error) from None
    try:
        request: T = msgspec.convert(raw, decoder.type, strict=True)
        return request
    except msgspec.ValidationError as error:
        raise _bad_field(error) from None
    except RecursionError as error:
        raise _not_json(error) from None


def _decode_untyped(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        if _OUT_OF_RANGE.match(str(error)):
            raise _number_out_of_range(body, kind) from None
        raise _not_json(error) from None


def _not_json(error: Exception) -> BadRequest:
    return BadRequest(f"The body is not valid JSON: {error}.")


def _number_out_of_range(body: bytes, kind: Any) -> BadRequest:
    """Names the field of a number that no float holds, such as 1e999; the strict decoder does
    not. Python's own reads it as infinity, which every range excludes."""
    try:
        msgspec.convert(json.loads(body), kind, strict=True)
    except msgspec.ValidationError as error:
        return _bad_field(error)
    except (ValueError, RecursionError):
        pass
    return BadRequest("The body has a number that is out of range.")


def _drop_inert(raw: dict[str, Any]) -> bool:
    """Remove fields that ask for nothing; true when there were any. Raises for unsupported ones."""
    inert = [name for name, value in raw.items() if value is None]
    for name, value in raw.items():
        if value is None or name not in _UNSUPPORTED:
            continue
        is_inert = value == raw.get("n", 1) if name == "best_of" else _UNSUPPORTED[name](value)
        if not is_inert:
            raise BadRequest(f"`{name}` is not supported by this server.", param=name)
        inert.append(name)
    for name in inert:
        del raw[name]
    return bool(inert)


def _bad_field(error: msgspec.ValidationError) -> BadRequest:
    """OpenAI's notation for msgspec's path: `$.messages[0].role` is `messages[0].role`."""
    message = str(error)
    path = ""
    if match := _PATH.search(message):
        path = match["path"].removeprefix(".").replace("[...]", "")
        message = message[: match.start()]
    if match := _UNKNOWN_FIELD.match(message):
        return _unknown_field(_join(path, match["field"]), match["field"])
    if match := _MISSING_FIELD.match(message):
        param = _join(path, match["field"])
        return BadRequest(f"`{param}` is required.", param=param)
    if not path:
        return BadRequest(f"The body must be a JSON object: {message}.")
    return BadRequest(f"Invalid value of `{path}`: {message}.", param=path)


def _unknown_field(param: str, field: str) -> BadRequest:
    if field in _UNSUPPORTED_PARTS and "content" in param:
        return BadRequest(f"Content of kind `{field}` is not supported; send text.", param=param)
    return BadRequest(f"Unknown field `{param[:200]}`.", param=param[:200])


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _check_generation(request: GenerationRequest) -> None:
    for key in request.logit_bias or ():
        if not _DIGITS.fullmatch(key):
            raise BadRequest(
                f"`logit_bias` has the key {key[:40]!r}, which is not a token id.",
                param="logit_bias",
            )
    limit = request.output_limit
    if limit is not None and request.min_tokens > limit:
        raise BadRequest(
            f"`min_tokens` is {request.min_tokens}, above the output limit {limit}.",
            param="min_tokens",
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequest("`stream_options` needs `stream` to be true.", param="stream_options")


def _check_messages(messages: list[Message]) -> None:
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role in ("tool", "function"):
            raise BadRequest(
                f"Messages of role `{message.role}` are not supported by this server.",
                param=f"{where}.role",
            )
        for name in ("tool_calls", "function_call", "audio", "refusal", "tool_call_id"):
            if getattr(message, name) not in (None, [], ""):
                raise BadRequest(
                    f"`{name}` is not supported by this server.", param=f"{where}.{name}"
                )
        if message.content is None:
            raise BadRequest(f"`{where}.content` is required.", param=f"{where}.content")
        if isinstance(message.content, str):
            continue
        for number, part in enumerate(message.content):
            if part.type != "text":
                raise BadRequest(
                    f"Content of kind {part.type[:40]!r} is not supported; send text.",
                    param=f"{where}.content[{number}].type",
                )


def _check_prompt(prompt: str | list[str | int | list[int]]) -> None:
    if isinstance(prompt, str):
        return
    if not prompt:
        raise BadRequest("`prompt` is an empty list.", param="prompt")
    kind = type(prompt[0])
    if len(set(map(type, prompt))) > 1:
        index = next(i for i, item in enumerate(prompt) if type(item) is not kind)
        raise BadRequest("`prompt` mixes texts, token ids and lists.", param=f"prompt[{index}]")
    if kind is not int and len(prompt) > MAX_PROMPTS:
        raise BadRequest(f"`prompt` has more than {MAX_PROMPTS} entries.", param="prompt")


def _check_continuation(add_generation_prompt: bool, continue_final_message: bool) -> None:
    if add_generation_prompt and continue_final_message:
        raise BadRequest(
            "`continue_final_message` needs `add_generation_prompt` to be false.",
            param="continue_final_message",
        )


def _check_depth(arguments: dict[str, Any] | None) -> None:
    """Templates, and what else walks the arguments, recurse into them."""
    level: list[Any] = [arguments]
    for _ in range(_MAX_ARGUMENT_DEPTH):
        level = [item for value in level for item in _items(value)]
        if not level:
            return
    raise BadRequest(
        f"`chat_template_kwargs` is nested deeper than {_MAX_ARGUMENT_DEPTH} levels.",
        param="chat_template_kwargs",
    )


def _items(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
