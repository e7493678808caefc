"""Large bodies: long texts are read, and millions of small values are refused unmade."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoy_contract.body_shape import MAX_STRUCTURE_BYTES, check_shape
from kvoy_contract.errors import BadRequest
from kvoy_contract.openai import MAX_MESSAGES, parse_chat, parse_completion

MANY = MAX_STRUCTURE_BYTES // 4
LONG = 'é[]{},:\\" ' * (MAX_STRUCTURE_BYTES // 4)


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def message(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "x", **fields}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (body_of(messages=[message(tool_calls=[[]] * MANY)]), "messages"),
        (body_of(messages=[message(tool_calls=[[]] * 1000) for _ in range(400)]), "messages"),
        (body_of(messages=[message(content=[{"type": "text", "text": ""}] * MANY)]), "messages"),
        (body_of(messages=[message(content=[[]] * MANY)]), "messages"),
        (body_of(messages=[message()], logit_bias={str(i): 1 for i in range(MANY)}), "logit_bias"),
        (body_of(messages=[message()], metadata={str(i): "1" for i in range(MANY)}), "metadata"),
        (body_of(messages=[message()], stop=["a"] * MANY), "stop"),
        (body_of(messages=[message()], chat_template_kwargs=[{}] * MANY), "chat_template_kwargs"),
        (body_of(messages=[message()], nobody_knows=[[]] * MANY), "nobody_knows"),
        (b'{"model":"m","messages":[' + b"[]," * MANY * 2 + b'[]],"messages":[]}', None),
        (b'{"model":"m","prompt":"x"' + b" " * MAX_STRUCTURE_BYTES + b"}", None),
    ],
    ids=range(11),
)
def test_many_small_values_are_refused_with_the_field_and_the_limit(
    body: bytes, param: str | None
) -> None:
    with pytest.raises(BadRequest, match=f"more than {MAX_STRUCTURE_BYTES} ") as refused:
        check_shape(body)

    assert refused.value.param == param


def test_too_many_prompts_and_messages_are_counted_before_they_are_made() -> None:
    with pytest.raises(BadRequest, match="`prompt` has more than 2048 entries"):
        check_shape(body_of(prompt=[[1, 1]] * MANY))
    with pytest.raises(BadRequest, match=f"`messages` has more than {MAX_MESSAGES} entries"):
        check_shape(body_of(messages=[message()] * MANY))


def test_long_texts_and_many_token_ids_are_read() -> None:
    chat = parse_chat(
        body_of(
            messages=[
                message(content=LONG),
                message(role="assistant", reasoning_content=LONG),
                message(content=[{"type": "text", "text": LONG}] * 3),
                *[message(content=LONG[:1000])] * (MAX_MESSAGES - 3),
            ],
            tools=[],
        )
    )
    assert chat.messages[0].content == LONG
    assert parse_completion(body_of(prompt=[7] * MANY * 2)).prompts == [[7] * MANY * 2]
    assert parse_completion(body_of(prompt=[LONG[:2000]] * 2048)).prompts[2047] == LONG[:2000]
    assert len(parse_completion(body_of(prompt=[[1] * 300] * 2048)).prompts) == 2048


@pytest.mark.parametrize("tail", [b"", b"}", b'"', b",", b"]}", b'"messages":[}'])
def test_what_is_no_json_is_left_to_the_decoder(tail: bytes) -> None:
    check_shape(b'{"a":[' + b"[" * MAX_STRUCTURE_BYTES + tail)
    check_shape(b"7" * (MAX_STRUCTURE_BYTES + 1) + tail)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["messages", "prompt", "tokens", "stop", "content"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.sampled_from(["content", "text", "role"]), inner, max_size=3)
            ),
        ),
    )
)
def test_a_long_text_is_never_in_the_way_whatever_else_there_is(fields: dict[str, Any]) -> None:
    check_shape(json.dumps({"prompt": LONG, **fields}).encode())
    check_shape(json.dumps({**fields, "prompt": LONG}).encode())
