"""A request that began on another engine goes on exactly where it was."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvoy_contract import envelope
from kvoy_contract.envelope import Envelope, ResumeState
from kvoy_contract.names import ENVELOPE_CONTENT_TYPE, SECRET_HEADER
from kvoy_contract.sse import SseParser, parse_token_ids_comment
from kvoy_engine.testing_server import RunningEngine, running_engine, sim_config

SECRET = "s3cret"
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT = {"model": "sim", "prompt": "hi", "stream": True}


class Answer:
    """A stream's text, ids and finish reasons per choice."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.num_roles = 0
        self.heads: set[tuple[str, int]] = set()
        self.usage: dict[str, Any] = {}

    def add(self, event: Any) -> None:
        for line in event.comments:
            for choice, ids, is_ended in parse_token_ids_comment(line) or ():
                self.ids.setdefault(choice, []).extend(ids)
                assert not is_ended or choice in self.reasons
        if event.data is None or event.is_done:
            return
        chunk = json.loads(event.data)
        self.usage = chunk.get("usage") or self.usage
        self.heads.add((chunk["id"], chunk["created"]))
        for choice in chunk["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.num_roles += "role" in choice.get("delta", {})
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + text
            if choice["finish_reason"]:
                assert index not in self.reasons, "a choice ends once"
                self.reasons[index] = choice["finish_reason"]


async def ask(
    engine: RunningEngine,
    body: dict[str, Any],
    resume: list[list[int]] | None = None,
    **known: Any,
) -> Answer:
    """`known`: what else the state says that the client knows."""
    message = Envelope(
        router_id="r",
        number=1,
        seed=77,
        want_token_ids=True,
        resume=ResumeState(resume, **known) if resume is not None else None,
        answer_id="of-the-first",
        created=12345,
    )
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {"content-type": ENVELOPE_CONTENT_TYPE, SECRET_HEADER: SECRET}
    data = envelope.encode(message, json.dumps(body).encode())
    parser, answer = SseParser(), Answer()
    async with httpx.AsyncClient(base_url=engine.url, timeout=20) as client:
        response = await client.post(path, content=data, headers=headers)
    assert response.status_code == 200, response.text
    for event in parser.feed(response.content):
        answer.add(event)
    return answer


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize("done", [1, 7, 19])
async def test_the_two_parts_join_to_the_whole(body: dict[str, Any], done: int) -> None:
    ask_body = body | {"max_tokens": 20, "stream_options": {"include_usage": True}}
    async with running_engine(sim_config(secret=SECRET)) as one:
        whole = await ask(one, ask_body)
    async with running_engine(sim_config(secret=SECRET)) as other:
        rest = await ask(other, ask_body, [whole.ids[0][:done]])

    assert whole.texts[0].endswith(rest.texts[0])
    assert len(rest.texts[0]) == 20 - done
    assert whole.ids[0][done:] == rest.ids[0]
    assert rest.reasons == whole.reasons == {0: "length"}
    assert rest.num_roles == 0
    assert rest.usage["completion_tokens"] == whole.usage["completion_tokens"] == 20


async def test_a_stop_string_across_the_seam_is_found() -> None:
    async with running_engine(sim_config(secret=SECRET)) as engine:
        whole = await ask(engine, TEXT | {"max_tokens": 30})
        stop = whole.texts[0][9:12]
        stopped = await ask(engine, TEXT | {"max_tokens": 30, "stop": stop})
        rest = await ask(engine, TEXT | {"max_tokens": 30, "stop": stop}, [whole.ids[0][:10]])

    assert stopped.texts[0] == whole.texts[0].split(stop)[0]
    assert rest.reasons == {0: "stop"}
    assert rest.texts[0] == ""
    assert stopped.ids[0] == whole.ids[0][: len(stopped.texts[0]) + 3]


async def test_choices_that_had_ended_only_say_so_again() -> None:
    body = TEXT | {"max_tokens": 12, "n": 3}
    async with running_engine(sim_config(secret=SECRET)) as engine:
        whole = await ask(engine, body)
        begun = [whole.ids[0], whole.ids[1][:5], []]
        rest = await ask(engine, body, begun)
        everything = await ask(engine, body, [whole.ids[i] for i in range(3)])

    assert rest.texts == {0: "", 1: whole.texts[1][5:], 2: whole.texts[2]}
    assert rest.reasons == everything.reasons == {0: "length", 1: "length", 2: "length"}
    assert set(everything.texts.values()) == {""}


async def test_what_the_client_knows_is_not_said_again() -> None:
    options = {"include_usage": True}
    body = CHAT | {"max_tokens": 12, "n": 3, "stream_options": options}
    async with running_engine(sim_config(secret=SECRET)) as engine:
        whole = await ask(engine, body)
        said = [whole.ids[0], whole.ids[1][:5], []]
        rest = await ask(engine, body, said, begun=[0, 1, 2], ended=[0], cached_tokens=7)
        usage = await ask(
            engine, body, [whole.ids[i] for i in range(3)], begun=[0, 1, 2], ended=[0, 1, 2]
        )

    assert rest.heads == whole.heads == {("chatcmpl-of-the-first", 12345)}
    assert whole.num_roles == 3
    assert rest.num_roles == 0
    assert rest.texts == {1: whole.texts[1][5:], 2: whole.texts[2]}
    assert rest.reasons == {1: "length", 2: "length"}
    assert rest.usage["completion_tokens"] == 36
    assert rest.usage["prompt_tokens_details"] == {"cached_tokens": 7}
    assert usage.reasons == {}
    assert usage.usage["completion_tokens"] == 36


async def test_a_scored_echo_is_not_repeated() -> None:
    body = TEXT | {"max_tokens": 12, "echo": True, "logprobs": 1, "n": 2}
    async with running_engine(sim_config(secret=SECRET)) as engine:
        whole = await ask(engine, body)
        rest = await ask(engine, body, [whole.ids[0][:5], whole.ids[1]])
        with pytest.raises(AssertionError, match="scored echo"):
            await ask(engine, body, [whole.ids[0][:5], []])

    assert whole.texts[0].startswith("hi")
    assert rest.texts == {0: whole.texts[0][len("hi") + 5 :], 1: ""}
    assert rest.ids[0] == whole.ids[0][5:]


async def test_ids_of_tokens_whose_logprobs_are_held_back_are_told_with_them() -> None:
    body = TEXT | {"max_tokens": 30, "logprobs": 1}
    async with running_engine(sim_config(secret=SECRET)) as engine:
        plain = await ask(engine, body)
        # It matches far into the text and never to its end: much is held back, then shown.
        held = body | {"stop": plain.texts[0][5:15] + "\0"}
        whole = await ask(engine, held)

    assert whole.texts == plain.texts
    assert whole.ids == plain.ids


async def test_a_resume_that_does_not_fit_the_request_is_refused() -> None:
    headers = {"content-type": ENVELOPE_CONTENT_TYPE, SECRET_HEADER: SECRET}
    body = json.dumps({"model": "sim", "prompt": "x", "max_tokens": 3, "n": 2}).encode()
    async with (
        running_engine(sim_config(secret=SECRET)) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
    ):
        for state in (
            ResumeState([[1]]),
            ResumeState([[1], [999_999]]),
            ResumeState([[1], [1, 2, 3, 4]]),
            ResumeState([[1], [1]], begun=[2]),
            ResumeState([[1], [1]], ended=[-1]),
        ):
            message = Envelope(router_id="r", number=1, resume=state)
            data = envelope.encode(message, body)

            answer = await client.post("/v1/completions", content=data, headers=headers)

            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "resume"
