"""Requests of all parts, the same for the same seed. Pure.

All of it is chat in plain words: not every peer takes token ids.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvoy_cli.bench.request import Request
from kvoy_cli.bench.workloads import sentence
from kvoy_contract.names import CHAT_COMPLETIONS_PATH

Messages = list[dict[str, str]]
_ANSWER_TOKENS = 8
_MESSAGE_TOKENS = 1000
"""Of one message of a long history, about as long as an answer or a tool's output is."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A history as the beginning of a JSON array of messages, without its end."""

    opening: bytes

    @classmethod
    def of_words(cls, num_words: int, words_per_message: int, seed: int) -> Conversation:
        """Users and assistants in turn, the last word an assistant's."""
        rng = random.Random(f"history-{seed}")
        messages: Messages = []
        while num_words > 0:
            count = max(2, min(num_words, words_per_message))
            role = "assistant" if len(messages) % 2 else "user"
            messages.append({"role": role, "content": sentence(rng, count)})
            num_words -= count
        return cls(msgspec.json.encode(messages)[:-1])

    def next_turn(self, model: str, text: str) -> Request:
        """The whole history and a new message, not streamed."""
        message = msgspec.json.encode({"role": "user", "content": text})
        head = b'{"model":%b,"max_tokens":%d,"temperature":0.0,"messages":' % (
            msgspec.json.encode(model),
            _ANSWER_TOKENS,
        )
        comma = b"," if len(self.opening) > 1 else b""
        return Request(CHAT_COMPLETIONS_PATH, head + self.opening + comma + message + b"]}")


def conversations(num_tokens: int, count: int, tokens_per_word: float) -> list[Conversation]:
    """Different histories of about so many tokens each, in messages of about a thousand."""
    num_words = round(num_tokens / tokens_per_word)
    per_message = round(_MESSAGE_TOKENS / tokens_per_word)
    return [Conversation.of_words(num_words, per_message, seed) for seed in range(count)]


def letters(rng: random.Random, count: int) -> str:
    """So many characters: with a byte tokenizer, as many tokens."""
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz    ", k=count))


def question(text: str) -> Messages:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True, slots=True)
class Groups:
    """Questions behind a common prefix each, in characters."""

    num_groups: int
    questions_per_group: int = 5
    prefix_chars: int = 600
    question_chars: int = 120

    def prompts(self, seed: str) -> list[Messages]:
        """Every question once, group by group."""
        rng = random.Random(f"groups-{seed}")
        prompts: list[Messages] = []
        for _ in range(self.num_groups):
            prefix = letters(rng, self.prefix_chars)
            prompts.extend(
                question(prefix + letters(rng, self.question_chars))
                for _ in range(self.questions_per_group)
            )
        return prompts


def drawn(prompts: Sequence[Messages], seed: str) -> Iterator[Messages]:
    """All of them in a random order, then in another, for ever."""
    rng = random.Random(f"order-{seed}")
    while True:
        yield from rng.sample(list(prompts), len(prompts))


def unique(chars: int, seed: str, prefix: str = "") -> Iterator[Messages]:
    rng = random.Random(f"unique-{seed}")
    while True:
        yield question(prefix + letters(rng, chars))


@dataclass(frozen=True, slots=True)
class Turn:
    think_s: float
    text: str


@dataclass(frozen=True, slots=True)
class ChatUsers:
    """People who chat: each turn is a while of thinking, then a message. All begin together."""

    num_users: int
    num_turns: int = 5
    first_chars: int = 300
    turn_chars: int = 120
    mean_think_s: float = 0.5

    def turns(self, number: int, seed: str) -> Iterator[Turn]:
        """Of one user, by number, who thinks as long whatever the seed of the texts is."""
        pauses, texts = random.Random(f"pauses-{number}"), random.Random(f"user-{seed}-{number}")
        yield Turn(pauses.random(), letters(texts, self.first_chars))
        for _ in range(self.num_turns - 1):
            yield Turn(pauses.expovariate(1 / self.mean_think_s), letters(texts, self.turn_chars))
