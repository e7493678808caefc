"""Beginnings of prompts that were encoded before: exact, bounded, and never somebody else's."""

from __future__ import annotations

import random
from array import array

from kvoy_contract.known_prefixes import MIN_CHARS, KnownPrefix, KnownPrefixes
from kvoy_contract.openai import ChatCompletionRequest, Message
from kvoy_contract.prompt import PromptEncoder, byte_tokenizer_files

WORDS = ["alpha", "beta<|", "<|im_start|>", "gamma", "|>", "d\n", "é🦙", "<|im_end|>user"]


def known(text: str, sentinel: str = "\ue000") -> KnownPrefix:
    return KnownPrefix(text, sentinel, array("I", range(len(text))))


def chat(texts: list[str]) -> ChatCompletionRequest:
    roles = ("user", "assistant")
    messages = [Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)]
    return ChatCompletionRequest(model="m", messages=messages)


def text_of(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def test_the_longest_beginning_is_found_whatever_follows_it() -> None:
    rng = random.Random(1)
    text = "".join(rng.choices("abcdef ", k=40_000))
    prefixes = KnownPrefixes()
    for length in (5_000, 12_000, 30_000):
        prefixes.add(known(text[:length]))

    for rest in ("", "x", text[30_000:]):
        found = prefixes.find(text[:30_000] + rest, "\ue000")
        assert found is not None
        assert len(found.text) == 30_000
    shorter = prefixes.find(text[:20_000] + "?" * 5_000, "\ue000")
    assert shorter is not None
    assert len(shorter.text) == 12_000


def test_what_differs_in_one_character_or_has_another_sentinel_is_not_found() -> None:
    text = "a" * 10_000
    prefixes = KnownPrefixes()
    prefixes.add(known(text))

    assert prefixes.find("a" * 100 + "b" + "a" * 20_000, "\ue000") is None
    assert prefixes.find(text, "\ue001") is None
    assert prefixes.find(text[:-1], "\ue000") is None
    assert prefixes.find(text, "\ue000") is not None


def test_a_short_beginning_is_not_kept() -> None:
    prefixes = KnownPrefixes()

    prefixes.add(known("a" * (MIN_CHARS - 1)))

    assert len(prefixes) == 0


def test_bytes_are_bounded_and_the_least_recently_used_goes_first() -> None:
    prefixes = KnownPrefixes(max_bytes=1_000_000)
    rng = random.Random(2)
    texts = ["".join(rng.choices("abcdefgh", k=8_000)) for _ in range(40)]

    for text in texts:
        prefixes.add(known(text))
        prefixes.find(texts[0], "\ue000")

    assert prefixes.num_bytes <= 1_000_000
    assert 1 < len(prefixes) < 40
    assert prefixes.find(texts[0], "\ue000") is not None
    assert prefixes.find(texts[1], "\ue000") is None
    assert prefixes.find(texts[-1], "\ue000") is not None


def test_beginnings_that_look_alike_to_the_keys_are_kept_apart() -> None:
    prefixes = KnownPrefixes()
    texts = [f"{number:05}" + "a" * 9_995 for number in range(30)]

    for text in texts:
        prefixes.add(known(text))

    assert 0 < len(prefixes) < 30
    found = prefixes.find(texts[-1] + "more", "\ue000")
    assert found is not None
    assert found.text == texts[-1]


def test_a_chat_that_goes_on_or_branches_has_the_ids_of_a_fresh_encoder() -> None:
    rng = random.Random(3)
    encoder = PromptEncoder(byte_tokenizer_files())
    histories = [[text_of(rng, 800), text_of(rng, 300)]]

    for _ in range(60):
        history = rng.choice(histories)[: rng.randrange(2, 12)]
        turns = [*history, text_of(rng, rng.randrange(1, 400))]
        fresh = PromptEncoder(byte_tokenizer_files()).encode_chat(chat(turns))
        assert encoder.encode_chat_array(chat(turns)).ids.tolist() == fresh
        histories.append([*turns, text_of(rng, rng.randrange(1, 400))])
    assert len(encoder.known_prefixes) > 5


def test_notes_of_a_shorter_beginning_hold_for_a_longer_one() -> None:
    short = known("a" * 5_000)
    short.notes["key"] = (b"hash",)

    longer = KnownPrefix("a" * 6_000, "\ue000", array("I", range(6_000)), short)
    longer.notes["other"] = ()

    assert longer.notes["key"] == (b"hash",)
    assert "other" not in short.notes
