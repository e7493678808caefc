"""Hashes of a conversation's next turn, from those that are kept with its beginning."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvoy_contract.blocks import block_hashes, seed_hash, stride_hashes
from kvoy_contract.openai import ChatCompletionRequest, Message
from kvoy_contract.prompt import PromptEncoder, byte_tokenizer_files
from kvoy_router.prompts import EncodedPrompt, Hashing, Prompts, T, encode


def chat(texts: list[str], salt: str | None) -> ChatCompletionRequest:
    roles = ("user", "assistant")
    messages = [Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)]
    return ChatCompletionRequest(model="m", messages=messages, cache_salt=salt)


@pytest.mark.parametrize("stride", [16, 64])
def test_every_turn_has_the_hashes_of_its_whole_prompt(stride: int) -> None:
    rng = random.Random(stride)
    files = byte_tokenizer_files()
    encoder = PromptEncoder(files)
    hashing = Hashing("identity", 16, stride, None)
    turns = ["first " * 1_000]

    for number in range(40):
        turns = turns[: rng.randrange(1, 9)]
        turns += [f"{number} " * rng.randrange(1, 300) for _ in range(rng.randrange(1, 3))]
        salt = rng.choice([None, *"abcdefghijkl"])
        prompt = encode(chat(turns, salt), encoder, files.digest, hashing)
        ids = PromptEncoder(files).encode_chat(chat(turns, salt))
        seed = seed_hash("identity", cache_salt=salt or "")
        whole = stride_hashes(block_hashes(seed, ids, 16), 16, stride)
        assert list(prompt.hashes) == whole
        assert prompt.num_tokens == len(ids)


class CountingPrompts(Prompts):
    num_threaded = 0

    async def in_thread(self, work: Callable[[], T]) -> T:
        self.num_threaded += 1
        return await super().in_thread(work)


@pytest.mark.parametrize(
    ("further", "goes_to_thread"),
    [(["short answer", "next question"], 0), (["long " * 4_000, "next"], 1), (["turn"] * 64, 1)],
)
async def test_a_long_chat_goes_to_a_thread_unless_little_of_it_is_new(
    further: list[str], goes_to_thread: int
) -> None:
    files, hashing = byte_tokenizer_files(), Hashing("identity", 16, 64, None)
    prompts = CountingPrompts()
    await prompts.add(files, None)
    turns = ["first " * 3_000, "answer " * 500, "question"]

    async def encoded(texts: list[str]) -> EncodedPrompt:
        return await prompts.encode(chat(texts, None), files.digest, hashing, len("".join(texts)))

    await encoded(turns)
    before = prompts.num_threaded
    prompt = await encoded(turns + further)
    prompts.close()

    assert before == 2  # the encoder itself was made in one, too
    assert prompts.num_threaded == before + goes_to_thread
    afresh = encode(chat(turns + further, None), PromptEncoder(files), files.digest, hashing)
    assert prompt == afresh
