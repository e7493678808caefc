"""`kvoy chat` through a pipe, as scripts use it."""

from __future__ import annotations

import io
from typing import Any

import pytest

from kvoy_cli import chat
from kvoy_cli.errors import CommandError


def talk(monkeypatch: pytest.MonkeyPatch, url: str, lines: str, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return chat.main(["--url", url, *options])


def test_a_conversation_grows_and_reset_forgets_it(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = talk(monkeypatch, endpoint.url, "one\ntwo\n/reset\nthree\n/quit\nfour\n")

    sent = [[message["content"] for message in body["messages"]] for body in endpoint.bodies]
    assert status == 0
    assert sent == [["one"], ["one", "Paris.", "two"], ["three"]]
    shown = capsys.readouterr().out
    assert shown.count("Paris.\n  [first token after") == 3
    assert "engine 127.0.0.1:8101]" in shown


def test_help_is_shown_and_not_sent(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, endpoint.url, "/help\n")

    assert endpoint.bodies == []
    assert "/reset" in capsys.readouterr().out


def test_options_reach_the_request(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--system", "be brief", "--temperature", "0", "--max-tokens", "7", "--api-key", "k"]

    talk(monkeypatch, endpoint.url, "hi\n", *options)

    body = endpoint.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert body["temperature"] == 0.0
    assert body["max_completion_tokens"] == 7
    assert endpoint.authorization == ["Bearer k"]


def test_a_failed_question_is_forgotten_and_makes_the_status_1(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.refusal = (503, "no engine is ready")

    status = talk(monkeypatch, endpoint.url, "one\ntwo\n", "--model", "tiny")

    assert status == 1
    assert [len(body["messages"]) for body in endpoint.bodies] == [1, 1]
    assert "no engine is ready" in capsys.readouterr().err


def test_several_models_ask_for_a_choice(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.models = ["a", "b"]

    with pytest.raises(CommandError, match="serves: a, b"):
        talk(monkeypatch, endpoint.url, "hi\n")
