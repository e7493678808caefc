"""What servers answer is what the official client expects, field by field."""

from typing import Any

import msgspec
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from kvoy_contract import openai as schemas

LOGPROBS = schemas.ChatLogprobs(
    [schemas.TokenLogprob("a", -0.5, [97], [schemas.TopLogprob("a", -0.5, [97])])]
)
COMMON: dict[str, Any] = {"id": "cmpl-1", "created": 1_700_000_000, "model": "m"}
USAGE = schemas.usage(10, 3, 8)

ANSWERS: list[tuple[type[BaseModel], msgspec.Struct]] = [
    (
        ChatCompletion,
        schemas.ChatCompletion(
            **COMMON,
            choices=[schemas.ChatChoice(0, schemas.ChatMessage("Hi"), "stop", LOGPROBS)],
            usage=USAGE,
        ),
    ),
    (
        ChatCompletionChunk,
        schemas.ChatCompletionChunk(
            **COMMON,
            choices=[schemas.ChatChunkChoice(0, schemas.ChatDelta("assistant", ""))],
        ),
    ),
    (
        ChatCompletionChunk,
        schemas.ChatCompletionChunk(
            **COMMON,
            choices=[schemas.ChatChunkChoice(1, schemas.ChatDelta(), LOGPROBS, "length")],
            usage=None,
        ),
    ),
    (ChatCompletionChunk, schemas.ChatCompletionChunk(**COMMON, choices=[], usage=USAGE)),
    (
        Completion,
        schemas.Completion(
            **COMMON,
            choices=[
                schemas.CompletionChoice(
                    0,
                    "Hi",
                    schemas.CompletionLogprobs(["H", "i"], [-1.0, -0.5], [{"H": -1.0}, {}], [0, 1]),
                    "stop",
                )
            ],
            usage=USAGE,
        ),
    ),
    (Model, schemas.ModelCard(id="m", created=1, max_model_len=8192)),
]


@pytest.mark.parametrize(("model", "answer"), ANSWERS)
def test_the_official_client_reads_it_strictly(
    model: type[BaseModel], answer: msgspec.Struct
) -> None:
    data = schemas.encode(answer)

    parsed = model.model_validate_json(data, strict=True)

    assert b"\n" not in data
    assert parsed.model_dump(exclude_unset=True) == msgspec.json.decode(data)


def test_a_delta_leaves_out_what_it_does_not_say() -> None:
    assert schemas.encode(schemas.ChatDelta(content="x")) == b'{"content":"x"}'


def test_usage_adds_up() -> None:
    assert msgspec.to_builtins(USAGE) == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
