"""Tokenizers built from GGUF metadata split and spell text as the models' own do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvoy_engine.gguf_convert import open_gguf
from kvoy_engine.gguf_testing import byte_alphabet, write_tiny_gguf
from kvoy_engine.gguf_tokenizer import merges_by_score, tokenizer_config, tokenizer_json
from kvoy_engine.model_errors import ModelSourceError

TEXTS = ["hello world", "  hello\n\n world 12  345", "ünïcødé 你好 \U0001f980", "", " ", "\t x"]


def load(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))


def metadata_of(tmp_path: Path, **options: Any) -> dict[str, Any]:
    write_tiny_gguf(tmp_path / "tiny.gguf", **options)
    return open_gguf(tmp_path / "tiny.gguf").metadata


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_text_survives_encoding_and_decoding(tmp_path: Path, pre: str) -> None:
    tokenizer = load(metadata_of(tmp_path, pre=pre) | {"tokenizer.ggml.add_bos_token": False})

    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_merges_build_the_longest_tokens(tmp_path: Path) -> None:
    tokenizer = load(metadata_of(tmp_path))

    assert tokenizer.encode("hello world").tokens == ["hello", "\u0120world"]


def test_smollm_splits_digits_and_the_spaces_before_them(tmp_path: Path) -> None:
    tokenizer = load(metadata_of(tmp_path, pre="smollm"))

    tokens = tokenizer.encode("a  12").tokens

    assert tokens == ["a", "\u0120", "\u0120", "1", "2"]
    split = tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in split] == ["a", "\u0120\u0120", "1", "2"]


def test_control_tokens_are_whole_and_special_and_padding_is_left_out(tmp_path: Path) -> None:
    metadata = metadata_of(tmp_path)
    tokenizer = load(metadata)

    ids = tokenizer.encode("<|im_start|>hello<|end|>").ids

    assert ids[0] == 1
    assert ids[-1] == 0
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.token_to_id("[PAD0]") is None


def test_the_configuration_names_special_tokens_and_carries_the_template(tmp_path: Path) -> None:
    config = tokenizer_config(metadata_of(tmp_path))

    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == "<|end|>"
    assert config["chat_template"].startswith("{% for m in messages %}")


def test_sentencepiece_text_begins_with_bos_and_survives(tmp_path: Path) -> None:
    tokenizer = load(metadata_of(tmp_path, tokenizer="llama"))

    tokens = tokenizer.encode("hello").tokens

    assert tokens == ["<s>", "\u2581hello"]
    for text in ["hello", "hello hell", "ünï 你好"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_an_unknown_split_rule_is_refused_by_name(tmp_path: Path) -> None:
    metadata = metadata_of(tmp_path) | {"tokenizer.ggml.pre": "viking"}

    with pytest.raises(ModelSourceError, match="viking"):
        tokenizer_json(metadata)


def test_an_unknown_tokenizer_kind_is_refused_by_name(tmp_path: Path) -> None:
    metadata = metadata_of(tmp_path) | {"tokenizer.ggml.model": "bert"}

    with pytest.raises(ModelSourceError, match="bert"):
        tokenizer_json(metadata)


def test_merges_follow_the_scores() -> None:
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
    scores = {"a": 0.0, "b": 0.0, "c": 0.0, "ab": -2.0, "bc": -1.0, "abc": -3.0}

    merges = merges_by_score(vocabulary, scores)

    assert merges == [["b", "c"], ["a", "b"], ["ab", "c"], ["a", "bc"]]


def test_the_byte_alphabet_has_256_letters() -> None:
    assert len(set(byte_alphabet())) == 256
