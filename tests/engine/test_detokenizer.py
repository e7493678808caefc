"""The text of a stream equals the whole text, however the tokens come."""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kvoy_contract.byte_tokenizer import byte_tokenizer_files
from kvoy_contract.prompt import PromptEncoder
from kvoy_contract.testing_tokenizer import (
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    tokenizer_files,
)
from kvoy_engine.detokenizer import REPLACEMENT, Detokenizer

HARD_TEXT = "Copy: 🦙👩‍👩‍👧‍👦 ďábel 访问 기\nCopy:"
MESSAGE_END = 258  # of the byte tokenizer


def opaque_tokenizer() -> Tokenizer:
    """One whose decoder says nothing about bytes: words with `##` for continued ones."""
    words = ["[UNK]", "hello", "world", "##ly", "##s", "!"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@functools.cache
def encoder_of(kind: str) -> PromptEncoder:
    match kind:
        case "bytes":
            return PromptEncoder(byte_tokenizer_files())
        case "byte-level":
            return PromptEncoder(tokenizer_files(byte_level_tokenizer()))
        case "sentencepiece":
            return PromptEncoder(tokenizer_files(sentencepiece_tokenizer()))
        case _:
            return PromptEncoder(tokenizer_files(opaque_tokenizer(), config={"eos_token": "[UNK]"}))


KINDS = ("bytes", "byte-level", "sentencepiece")


def one_by_one(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    pieces = [detokenizer.push([token_id]).text for token_id in ids]
    return [*pieces, detokenizer.finish().text]


def at_once(detokenizer: Detokenizer, ids: list[int]) -> str:
    return detokenizer.push(ids).text + detokenizer.finish().text


@pytest.mark.parametrize("kind", KINDS)
def test_no_chunk_shows_a_part_of_a_character_at_any_cut(kind: str) -> None:
    encoder = encoder_of(kind)
    ids = encoder.codec.encode(HARD_TEXT)

    for end in range(len(ids) + 1):
        pieces = one_by_one(Detokenizer(encoder, []), ids[:end])

        assert not any(REPLACEMENT in piece for piece in pieces[:-1])
        assert "".join(pieces) == at_once(Detokenizer(encoder, []), ids[:end])
        assert HARD_TEXT.startswith("".join(pieces).rstrip(REPLACEMENT))


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_text_comes_back(kind: str) -> None:
    encoder = encoder_of(kind)

    text = at_once(Detokenizer(encoder, []), encoder.codec.encode(HARD_TEXT))

    assert text == HARD_TEXT


def test_behind_a_prompt_a_new_word_keeps_its_space() -> None:
    encoder = encoder_of("sentencepiece")
    fox = encoder.codec.encode("fox")

    assert at_once(Detokenizer(encoder, []), fox) == "fox"
    assert at_once(Detokenizer(encoder, fox), fox) == " fox"


def test_a_tokenizer_of_unknown_kind_is_decoded_by_windows() -> None:
    encoder = encoder_of("words")
    ids = [encoder.codec.encode(word)[0] for word in ("hello", "world")]
    continued = [1, 2, 3, 4, 5]

    pieces = one_by_one(Detokenizer(encoder, ids), continued)

    assert not encoder.codec.is_byte_exact
    whole = encoder.decode(ids + continued, False)
    assert "".join(pieces) == whole.removeprefix(encoder.decode(ids, False))


@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_in_any_groups_give_the_same_text(kind: str, data: st.DataObject) -> None:
    encoder = encoder_of(kind)
    ids = data.draw(st.lists(st.integers(0, encoder.vocab_size - 1), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=5).map(sorted))
    stops = data.draw(st.lists(st.text("abe ", min_size=1, max_size=3), max_size=3))
    groups = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]

    grouped = Detokenizer(encoder, [], stops)
    deltas = [grouped.push(group) for group in groups]
    text = "".join(delta.text for delta in deltas) + grouped.finish().text

    assert text == at_once(Detokenizer(encoder, [], stops), ids)
    assert sum(len(delta.tokens) for delta in deltas) == grouped.num_tokens


@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_replay_the_text_goes_on_as_if_undisturbed(kind: str, data: st.DataObject) -> None:
    encoder = encoder_of(kind)
    ids = data.draw(st.lists(st.integers(0, encoder.vocab_size - 1), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    stops = ["ab", "e t", "\n\n"]
    undisturbed = Detokenizer(encoder, [], stops)
    before = [undisturbed.push([token_id]) for token_id in ids[:cut]]

    resumed = Detokenizer(encoder, [], stops)
    replayed = resumed.replay(ids[:cut])

    assert replayed.text == "".join(delta.text for delta in before)
    assert replayed.stopped == any(delta.stopped for delta in before)
    assert [resumed.push([i]) for i in ids[cut:]] == [undisturbed.push([i]) for i in ids[cut:]]
    assert resumed.finish() == undisturbed.finish()


@given(st.text(alphabet="abx", max_size=14), st.booleans())
def test_tokens_whose_text_was_all_shown_are_replayed_as_shown(text: str, include: bool) -> None:
    encoder, ids = encoder_of("bytes"), list(text.encode())
    stops = ["aax", "abab"]
    undisturbed = Detokenizer(encoder, [], stops, include)
    shown = [undisturbed.push([token_id]).text for token_id in ids]
    whole = "".join(shown) + undisturbed.finish().text
    # Every such moment: as many characters as tokens, since each token is one.
    for num_shown in set(itertools.accumulate(map(len, shown))):
        resumed = Detokenizer(encoder, [], stops, include)

        replayed = resumed.replay(ids[:num_shown], is_all_shown=True)

        assert replayed.text == whole[:num_shown]
        rest = resumed.push(ids[num_shown:]).text + resumed.finish().text
        assert replayed.text + rest == whole


@pytest.mark.parametrize(
    ("include", "expected"), [(False, "one two"), (True, "one two END")], ids=["cut", "kept"]
)
def test_a_stop_string_across_pieces_ends_the_text(include: bool, expected: str) -> None:
    encoder = encoder_of("bytes")
    detokenizer = Detokenizer(encoder, [], [" END", "never"], include_stop=include)

    deltas = [detokenizer.push(list(piece.encode())) for piece in ("one two E", "N", "D three")]

    assert deltas[0].text == "one two"
    assert deltas[1].text == ""
    assert [delta.stopped for delta in deltas] == [False, False, True]
    assert deltas[2].stop_string == " END"
    assert "".join(delta.text for delta in deltas) + detokenizer.finish().text == expected


def test_tokens_behind_a_stop_string_are_not_taken() -> None:
    detokenizer = Detokenizer(encoder_of("bytes"), [], ["b"])

    delta = detokenizer.push(list(b"abcd"))

    assert [token.text for token in delta.tokens] == ["a", "b"]
    assert detokenizer.num_tokens == 2
    assert detokenizer.push(list(b"e")).tokens == ()


def test_text_that_looked_like_a_stop_string_is_shown_at_the_end() -> None:
    detokenizer = Detokenizer(encoder_of("bytes"), [], ["<stop>"])

    held = detokenizer.push(list(b"a<sto"))

    assert held.text == "a"
    assert detokenizer.finish().text == "<sto"


def test_a_stop_string_counts_from_the_token_after_the_least_number() -> None:
    detokenizer = Detokenizer(encoder_of("bytes"), [], ["x"], min_tokens=3)

    deltas = [detokenizer.push([byte]) for byte in b"axxbx"]

    assert [delta.stopped for delta in deltas] == [False, False, False, False, True]
    assert "".join(delta.text for delta in deltas) == "axxb"


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    ids = [*b"hi", MESSAGE_END]

    hidden = Detokenizer(encoder_of("bytes"), []).push(ids)
    shown = Detokenizer(encoder_of("bytes"), [], skip_special_tokens=False).push(ids)

    assert hidden.text == "hi"
    assert [token.data for token in hidden.tokens] == [b"h", b"i", b""]
    assert hidden.tokens[-1].text == "<|im_end|>"
    assert shown.text == "hi<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_offsets_of_tokens_describe_the_text(kind: str) -> None:
    encoder = encoder_of(kind)
    detokenizer = Detokenizer(encoder, [])

    delta = detokenizer.push(encoder.codec.encode(HARD_TEXT))

    text = delta.text + detokenizer.finish().text
    assert b"".join(token.data for token in delta.tokens).decode() == text
    for token in delta.tokens:
        if REPLACEMENT not in token.text:
            assert text.startswith(token.data.decode(), token.offset)


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    llama = list("🦙".encode())

    delta = Detokenizer(encoder_of("bytes"), [*b"x", *llama[:2]]).push(llama[2:])

    assert delta.text == "🦙"


def test_endless_broken_bytes_are_not_held_for_ever() -> None:
    detokenizer = Detokenizer(encoder_of("bytes"), [])

    shown = "".join(detokenizer.push([0xF0]).text for _ in range(100))

    assert shown == REPLACEMENT * 99
