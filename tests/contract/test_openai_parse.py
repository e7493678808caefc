"""Clients' bodies: what is accepted, and that every refusal names the field that is wrong."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy_contract.errors import BadRequest
from kvoy_contract.openai import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)

USER = {"role": "user", "content": "Hi"}


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def completion_body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "Hi", **fields}).encode()


def test_a_chat_with_everything_set_is_read() -> None:
    request = parse_chat(
        chat_body(
            stream=True,
            stream_options={"include_usage": True},
            n=3,
            max_tokens=5,
            max_completion_tokens=7,
            min_tokens=2,
            temperature=0,
            top_p=0.5,
            top_k=-1,
            seed=-1,
            stop=["a", "b"],
            stop_token_ids=[3],
            logit_bias={"12": -100, "13": 1.5},
            logprobs=True,
            top_logprobs=2,
            chat_template_kwargs={"enable_thinking": False},
            user="u",
            metadata={"a": "b"},
        )
    )

    assert request.output_limit == 7
    assert request.stop_strings == ("a", "b")
    assert request.token_biases == {12: -100.0, 13: 1.5}
    assert request.num_logprobs == 2
    assert request.wants_usage


def test_the_least_chat_has_the_documented_defaults() -> None:
    request = parse_chat(chat_body())

    assert (request.n, request.stream, request.output_limit) == (1, False, None)
    assert request.num_logprobs is None
    assert request.stop_strings == ()
    assert not request.wants_usage


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": None, "stop": None, "tools": None, "stream": None, "n": None},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tool_choice": "auto", "functions": [], "function_call": "none"},
        # What other routers add to whatever they pass on.
        {"no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True},
        {"stream_reasoning": True, "include_reasoning": True},
        {"response_format": {"type": "text"}, "modalities": ["text"], "store": False},
        {"best_of": 1, "service_tier": "auto", "reasoning_effort": "none"},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert parse_chat(chat_body(**fields)) == msgspec.structs.replace(
        parse_chat(chat_body()), service_tier=fields.get("service_tier")
    )


def test_an_answer_of_the_official_client_comes_back_as_a_message() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }

    request = parse_chat(chat_body(messages=[USER, answer, USER]))

    assert request.messages[1].content == "Hello"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 0}, "n", ">= 1"),
        ({"n": 1000}, "n", "<= 128"),
        ({"n": "2"}, "n", "`int`"),
        ({"n": True}, "n", "`int`"),
        ({"temperature": -0.1}, "temperature", ">= 0.0"),
        ({"temperature": 2.1}, "temperature", "<= 2.0"),
        ({"temperature": "hot"}, "temperature", "`float"),
        ({"top_p": 0}, "top_p", "> 0.0"),
        ({"top_p": 1.1}, "top_p", "<= 1.0"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"min_p": 2}, "min_p", "<= 1.0"),
        ({"presence_penalty": 3}, "presence_penalty", "<= 2.0"),
        ({"frequency_penalty": -3}, "frequency_penalty", ">= -2.0"),
        ({"repetition_penalty": 0}, "repetition_penalty", ">= 0.01"),
        ({"seed": 2**63}, "seed", "<= 9223372036854775807"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"max_tokens": -1}, "max_tokens", ">= 0"),
        ({"min_tokens": 10, "max_tokens": 5}, "min_tokens", "5"),
        ({"stop": ""}, "stop", "length >= 1"),
        ({"stop": ["a", ""]}, "stop[1]", "length >= 1"),
        ({"stop": ["a"] * 33}, "stop", "length <= 32"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
        ({"logit_bias": {"abc": 1}}, "logit_bias", "'abc'"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "'-5'"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "<= 100.0"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "`float`"),
        ({"logprobs": 1}, "logprobs", "`bool`"),
        ({"top_logprobs": 1}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unknown"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": "Hi"}, "messages", "`array`"),
        ({"messages": ["Hi"]}, "messages[0]", "`object`"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": 1, "content": ""}]}, "messages[0].role", "`str`"),
        ({"messages": [{"role": "a b", "content": ""}]}, "messages[0].role", "regex"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "required"),
        ({"messages": [USER | {"x": 1}]}, "messages[0].x", "Unknown"),
        ({"model": 1}, "model", "`str`"),
        ({"no_such_field": 1}, "no_such_field", "Unknown"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        ({"cache_salt": ""}, "cache_salt", "length >= 1"),
    ],
)
def test_a_wrong_value_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_chat(chat_body(**fields))

    assert refused.value.param == param
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("return_hidden_states", True),
        ("include_reasoning", False),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "schema": {"type": "object"}}),
        ("response_format", {"type": "yaml"}),
        ("response_format", ""),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("kv_transfer_params", {}),
        ("resume", {"output_ids": []}),
        ("guided_json", {}),
        ("guided_regex", "((("),
        ("structured_outputs", {"regex": "((("}),
        ("best_of", 2),
        ("chat_template", "{{ 1 }}"),
        ("store", True),
        ("prompt_logprobs", 1),
        ("reasoning_effort", "high"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=f"`{name}` is not supported") as refused:
        parse_chat(chat_body(**{name: value}))

    assert refused.value.param == name


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "x", "text": ""}]},
            "messages[0].content[1].type",
        ),
    ],
)
def test_messages_of_unsupported_kinds_are_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest, match="not supported") as refused:
        parse_chat(chat_body(messages=[message]))

    assert refused.value.param == param


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_missing_field_is_named(name: str) -> None:
    body = {"model": "m", "messages": [USER]}
    del body[name]

    with pytest.raises(BadRequest, match="required") as refused:
        parse_chat(json.dumps(body).encode())

    assert refused.value.param == name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": NaN}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"model": "m", "messages": [], "chat_template_kwargs": ' + b'{"a":' * 200_000,
    ],
    ids=lambda body: f"{len(body)} bytes" if len(body) > 80 else repr(body),
)
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    for parse in (parse_chat, parse_completion, parse_tokenize, parse_detokenize):
        with pytest.raises(BadRequest):
            parse(body)


TEXTS = st.text('aé🦙"\\', max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["model", "messages", "prompt", "stop", "n", "tools", "logit_bias", "best_of", "store", "x"]
)


@given(st.dictionaries(NAMES, JSON))
def test_whatever_the_body_it_is_read_or_refused(fields: dict[str, Any]) -> None:
    for body in (chat_body(**fields), completion_body(**fields)):
        for parse in (parse_chat, parse_completion):
            with contextlib.suppress(BadRequest):
                parse(body)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
    ],
)
def test_a_completion_takes_texts_and_token_ids(prompt: object, prompts: object) -> None:
    assert parse_completion(completion_body(prompt=prompt)).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], 2]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": [USER]}, "messages"),
    ],
)
def test_a_wrong_completion_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_completion(completion_body(**fields))

    assert refused.value.param == param


def test_an_echo_alone_may_ask_for_no_new_token() -> None:
    request = parse_completion(completion_body(echo=True, max_tokens=0, logprobs=1))

    assert request.output_limit == 0
    assert request.num_logprobs == 1


def test_tokenize_takes_a_prompt_or_a_chat_and_not_both() -> None:
    assert parse_tokenize(b'{"prompt": "Hi"}').prompt == "Hi"
    chat = parse_tokenize(json.dumps({"model": "m", "messages": [USER]}).encode()).as_chat()
    assert chat == parse_chat(chat_body())
    for body in (b"{}", json.dumps({"prompt": "a", "messages": [USER]}).encode()):
        with pytest.raises(BadRequest) as refused:
            parse_tokenize(body)
        assert refused.value.param == "prompt"


def test_detokenize_takes_token_ids() -> None:
    assert parse_detokenize(b'{"model": "m", "tokens": [1, 2]}').tokens == [1, 2]
    with pytest.raises(BadRequest) as refused:
        parse_detokenize(b'{"tokens": [-1]}')
    assert refused.value.param == "tokens[0]"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (b'"temperature":1e999', "temperature"),
        (b'"max_tokens":1e999', "max_tokens"),
        (b'"logit_bias":{"1":-1e999}', "logit_bias"),
        (b'"chat_template_kwargs":{"a":1e999}', None),
        (b'"max_tokens":1' + b"0" * 5000, None),
    ],
)
def test_a_number_that_no_float_holds_is_refused_by_name_where_it_has_one(
    field: bytes, param: str | None
) -> None:
    body = chat_body()[:-1] + b"," + field + b"}"

    with pytest.raises(BadRequest) as caught:
        parse_chat(body)

    assert caught.value.param == param


@pytest.mark.parametrize("depth", [65, 900, 100_000])
@pytest.mark.parametrize("inert", [b"", b'"user":null,'])
def test_deep_template_arguments_are_refused(depth: int, inert: bytes) -> None:
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    body = chat_body()[:-1] + b"," + inert + b'"chat_template_kwargs":' + deep + b"}"

    with pytest.raises(BadRequest):
        parse_chat(body)


def test_template_arguments_of_a_usual_depth_are_accepted() -> None:
    request = parse_chat(chat_body(chat_template_kwargs={"a": [{"b": {"c": [1, 2]}}]}))

    assert request.chat_template_kwargs == {"a": [{"b": {"c": [1, 2]}}]}


def test_the_choices_of_all_prompts_together_are_bounded() -> None:
    parse_completion(completion_body(prompt=["a"] * 1024, n=2))

    with pytest.raises(BadRequest) as caught:
        parse_completion(completion_body(prompt=["a"] * 1025, n=2))

    assert caught.value.param == "n"


def test_a_role_ends_where_its_line_ends() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(chat_body(messages=[{"role": "user\n", "content": "Hi"}]))

    assert caught.value.param == "messages[0].role"
