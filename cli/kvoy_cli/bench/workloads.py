"""Named workloads: pure generators of prompts, the same for the same seed.

Prompts are token ids (so that sizes are exact and no tokenizer is needed) or, for conversations,
chat messages in plain words. Ids lie above the bytes and special tokens of every tokenizer in
use unless a smaller vocabulary is given.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FIRST_ID = 32
_SMALL_VOCABULARY = 256

_WORDS = [
    "river",
    "stone",
    "market",
    "garden",
    "winter",
    "letter",
    "engine",
    "harbour",
    "silver",
    "meadow",
    "castle",
    "window",
    "orchard",
    "bridge",
    "candle",
    "forest",
    "kettle",
    "lantern",
    "mirror",
    "needle",
    "ocean",
    "paper",
    "quarry",
    "ribbon",
    "saddle",
    "temple",
    "valley",
    "whistle",
    "amber",
    "basket",
    "copper",
    "dragon",
    "ember",
    "feather",
    "glacier",
    "hammer",
    "island",
    "jacket",
    "kernel",
    "ladder",
    "marble",
    "noodle",
    "oyster",
    "pepper",
    "quilt",
    "rocket",
    "shelter",
    "tunnel",
    "umbrella",
    "velvet",
    "walnut",
    "yellow",
    "zephyr",
]


def random_ids(rng: random.Random, count: int, vocab_size: int = _SMALL_VOCABULARY) -> list[int]:
    """Ids that are ordinary tokens: never the lowest ones, where special tokens live."""
    return [rng.randrange(_FIRST_ID, vocab_size) for _ in range(count)]


def short_prompts(
    count: int, num_tokens: int, seed: int, vocab_size: int = _SMALL_VOCABULARY
) -> list[list[int]]:
    """Prompts that share nothing: no two have an equal first block."""
    rng = random.Random(f"short-{seed}")
    return [random_ids(rng, num_tokens, vocab_size) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class SharedPrefixShape:
    """Groups of questions behind a common prefix each, in the published ratios.

    The reference: 150 groups of 5 questions, 6,000 : 1,200 : 1,000 tokens, eight engines of
    307,328 KV tokens. Prefixes and questions then fill 0.73 of all KV, 5.9 times one engine's.
    """

    num_groups: int = 150
    questions_per_group: int = 5
    prefix_tokens: int = 600
    question_tokens: int = 120
    output_tokens: int = 100

    @property
    def num_prompts(self) -> int:
        return self.num_groups * self.questions_per_group

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.question_tokens

    @property
    def working_set_tokens(self) -> int:
        """All prefixes, each once, and all questions."""
        return self.num_groups * self.prefix_tokens + self.num_prompts * self.question_tokens

    def blocks_per_engine(
        self, num_engines: int, block_size: int = 16, share_of_all: float = 0.73
    ) -> int:
        """KV blocks per engine with which the working set is `share_of_all` of the fleet's KV."""
        return round(self.working_set_tokens / share_of_all / num_engines / block_size)


def shared_prefix_prompts(
    shape: SharedPrefixShape, seed: int, vocab_size: int = _SMALL_VOCABULARY
) -> list[list[int]]:
    """Every prompt once, group by group: `questions_per_group` neighbours share their prefix."""
    rng = random.Random(f"shared-prefix-{seed}")
    prompts: list[list[int]] = []
    for _ in range(shape.num_groups):
        prefix = random_ids(rng, shape.prefix_tokens, vocab_size)
        prompts.extend(
            prefix + random_ids(rng, shape.question_tokens, vocab_size)
            for _ in range(shape.questions_per_group)
        )
    return prompts


def shuffled_forever(prompts: Sequence[list[int]], seed: int) -> Iterator[list[int]]:
    """All prompts in a random order, then all of them in another, and so on."""
    rng = random.Random(f"order-{seed}")
    while True:
        yield from rng.sample(prompts, len(prompts))


@dataclass(frozen=True, slots=True)
class ChatScript:
    """What one user says, turn by turn; the answers come from the server."""

    system: str
    turns: tuple[str, ...]


def chat_script(num_turns: int, words_per_turn: int, seed: int) -> ChatScript:
    """Two scripts of different seeds differ from the first words of the system message on."""
    rng = random.Random(f"chat-{seed}")
    return ChatScript(
        system=f"{sentence(rng, 6)} You answer in plain prose. {sentence(rng, words_per_turn)}",
        turns=tuple(
            f"Turn {turn + 1}: go on with a story about {sentence(rng, words_per_turn)}"
            for turn in range(num_turns)
        ),
    )


_WORDS_PER_MESSAGE = 700


def long_chat(num_words: int, seed: int) -> list[dict[str, str]]:
    """Messages of users and assistants in turn; the last one is a user's."""
    rng = random.Random(f"long-chat-{seed}")
    count = max(1, num_words // _WORDS_PER_MESSAGE) | 1
    return [
        {
            "role": "assistant" if index % 2 else "user",
            "content": sentence(rng, max(2, num_words // count)),
        }
        for index in range(count)
    ]


def sentence(rng: random.Random, num_words: int) -> str:
    words = rng.choices(_WORDS, k=num_words)
    return f"{words[0].capitalize()} {' '.join(words[1:])}."
