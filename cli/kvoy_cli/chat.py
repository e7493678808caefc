"""`kvoy chat`: a conversation with a running endpoint, streamed into the terminal.

After each answer: time to first token, tokens per second, cached prompt tokens, and the engine
that answered. `/reset` forgets the conversation, `/quit` ends, `/help` says so; Ctrl-C cancels an
answer, at the prompt it ends. Reads questions line by line from a pipe as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvoy_cli.client import Answer, Endpoint, Message
from kvoy_cli.errors import CommandError
from kvoy_contract.names import DEFAULT_ROUTER_PORT
from kvoy_contract.settings import read_settings, setting

COMMANDS = "/reset forgets, /quit ends, Ctrl-C cancels"


@dataclass(frozen=True, slots=True)
class ChatConfig:
    url: str = setting(
        f"http://127.0.0.1:{DEFAULT_ROUTER_PORT}/v1", metavar="URL", help="the OpenAI endpoint"
    )
    model: str | None = setting(
        None, metavar="NAME", help="name of the model (default: the only one that is served)"
    )
    system: str | None = setting(
        None, metavar="TEXT", help="system message (default: what the model's template says)"
    )
    max_tokens: int = setting(512, help="longest answer, in tokens")
    temperature: float | None = setting(
        None, help="0 always takes the likeliest token (default: the server's)"
    )
    seed: int | None = setting(None, help="makes answers repeatable (default: they differ)")
    api_key: str | None = setting(
        None, metavar="TEXT", help="sent as bearer token (default: OPENAI_API_KEY, if set)"
    )


def main(argv: Sequence[str]) -> int:
    config = read_settings(ChatConfig, "kvoy chat", "Talk to a running endpoint.", argv)
    endpoint = Endpoint(config.url, config.api_key or os.environ.get("OPENAI_API_KEY"))
    chat = Chat(endpoint, config.model or only_model(endpoint), config)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{chat.model} at {endpoint.base_url}; {COMMANDS}")
    return run(chat, is_terminal)


def only_model(endpoint: Endpoint) -> str:
    """The name of the one served model. Raises CommandError when there is a choice, or none."""
    names = endpoint.models()
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        raise CommandError(f"choose a model with --model; {endpoint.base_url} serves: {listed}")
    return names[0]


class Chat:
    """One conversation. A cancelled or failed answer leaves it as it was before the question."""

    def __init__(self, endpoint: Endpoint, model: str, config: ChatConfig) -> None:
        self.model = model
        self._endpoint = endpoint
        self._config = config
        self._messages: list[Message] = []
        self.reset()

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    def reset(self) -> None:
        system = self._config.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> Answer:
        """Print the answer as it comes. Raises CommandError, KeyboardInterrupt."""
        answer = Answer()
        messages = [*self._messages, {"role": "user", "content": question}]
        pieces = self._endpoint.stream_chat(
            answer,
            self.model,
            messages,
            max_completion_tokens=self._config.max_tokens,
            temperature=self._config.temperature,
            seed=self._config.seed,
        )
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
        finally:
            # Closing the connection is what cancels an answer that is under way.
            pieces.close()
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


def run(chat: Chat, is_terminal: bool) -> int:
    """Read questions until the end of input or /quit; 1 when a piped question failed."""
    status = 0
    while (question := _read_question(is_terminal)) is not None:
        if question == "/quit":
            break
        if question == "/reset":
            chat.reset()
            print("(forgotten)")
            continue
        if question in ("/help", "/?"):
            print(COMMANDS)
            continue
        if not question:
            continue
        try:
            answer = chat.ask(question)
            print(f"\n  [{answer.summary()}]")
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n(cancelled)")
        except CommandError as error:
            print(f"\nkvoy chat: {error}", file=sys.stderr)
            status = 0 if is_terminal else 1
    return status


def _read_question(is_terminal: bool) -> str | None:
    """The next line without spaces around it; None at the end of input or at Ctrl-C."""
    if not is_terminal:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
