"""The command's client: streamed text, its numbers, and errors in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from kvoy_cli.client import Answer, Endpoint
from kvoy_cli.errors import CommandError

QUESTION = [{"role": "user", "content": "?"}]


def test_text_comes_in_pieces_with_its_numbers(endpoint: Any) -> None:
    answer = Answer()

    pieces = list(Endpoint(endpoint.url).stream_chat(answer, "tiny", QUESTION, seed=1))

    assert pieces == ["Par", "is", "."]
    assert answer.text == "Paris."
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (40, 3, 32)
    assert answer.engine == "127.0.0.1:8101"
    assert answer.finish_reason == "stop"
    assert answer.ttft_s is not None
    assert "32 of 40 prompt tokens cached, engine 127.0.0.1:8101" in answer.summary()
    assert endpoint.bodies[0]["seed"] == 1
    assert "temperature" not in endpoint.bodies[0]


def test_a_refusal_shows_the_server_s_message(endpoint: Any) -> None:
    endpoint.refusal = (404, "The model `x` does not exist.")

    with pytest.raises(CommandError, match="status 404: The model `x` does not exist"):
        list(Endpoint(endpoint.url).stream_chat(Answer(), "x", QUESTION))


def test_an_error_inside_the_stream_is_shown(endpoint: Any) -> None:
    endpoint.error_in_stream = "the engine broke"

    with pytest.raises(CommandError, match="the engine broke"):
        list(Endpoint(endpoint.url).stream_chat(Answer(), "tiny", QUESTION))


def test_a_stream_that_is_cut_is_no_answer(endpoint: Any) -> None:
    endpoint.is_cut = True

    with pytest.raises(CommandError, match="broke off"):
        list(Endpoint(endpoint.url).stream_chat(Answer(), "tiny", QUESTION))


def test_closing_the_stream_cancels_the_request(endpoint: Any) -> None:
    endpoint.num_endless = 1
    pieces = Endpoint(endpoint.url).stream_chat(Answer(), "tiny", QUESTION)

    next(pieces)
    pieces.close()

    assert endpoint.client_left.wait(30)


def test_nobody_there_is_said() -> None:
    with pytest.raises(CommandError, match=r"cannot reach http://127\.0\.0\.1:1/v1"):
        Endpoint("127.0.0.1:1").models()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http:///v1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(CommandError, match="not an endpoint"):
        Endpoint(url)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_path_of_the_api_may_be_left_out(suffix: str) -> None:
    assert Endpoint(f"http://host:1{suffix}").base_url == "http://host:1/v1"
