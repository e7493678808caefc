import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvoy_contract.byte_tokenizer import VOCAB_SIZE, ByteCodec, byte_tokenizer_files
from kvoy_contract.codec import HuggingFaceCodec
from kvoy_contract.tokenizer_files import TokenizerFiles

TEXTS = ["", "Hi", "ďábel 访问 기 🦙\n\t", "a<|im_end|>b<|im_start|>", "<|im_end", "\x00\x7f\u0080"]


def test_a_folder_is_read_without_what_is_not_about_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"bos_token": {"content": "<s>"}}')
    (tmp_path / "config.json").write_bytes(b'{"eos_token_id": [1, 2], "hidden_size": 64}')
    (tmp_path / "model.safetensors").write_bytes(b"x")

    files = TokenizerFiles.from_folder(tmp_path)

    assert sorted(files.parts) == [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert files.read_json("generation_config.json") == {"eos_token_id": [1, 2]}
    assert files.special_tokens() == {"bos_token": "<s>"}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        TokenizerFiles.from_folder(tmp_path)


def test_the_digest_covers_names_and_contents_in_any_order() -> None:
    parts = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}

    digest = TokenizerFiles.from_parts(parts).digest

    assert digest == TokenizerFiles.from_parts(dict(reversed(parts.items()))).digest
    assert digest != TokenizerFiles.from_parts(parts | {"tokenizer.json": b"{} "}).digest
    assert digest != TokenizerFiles.from_parts({"tokenizer.json": b"{}"}).digest


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": b"{}", "../evil": b""}, "evil"),
    ],
)
def test_parts_that_make_no_tokenizer_are_refused(parts: dict[str, bytes], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenizerFiles.from_parts(parts)


@pytest.mark.parametrize("data", [b"{", b"{}", b'{"model": {"type": "BPE"}}', b"\xff"])
def test_a_broken_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        HuggingFaceCodec(TokenizerFiles.from_parts({"tokenizer.json": data}))


@pytest.mark.parametrize(
    ("parts", "template"),
    [
        ({}, None),
        ({"tokenizer_config.json": b'{"chat_template": "a"}'}, "a"),
        ({"tokenizer_config.json": b'{"chat_template": "a"}', "chat_template.jinja": b"b"}, "b"),
        ({"chat_template.json": b'{"chat_template": "c"}'}, "c"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {
                        "chat_template": [
                            {"name": "tool_use", "template": "d"},
                            {"name": "default", "template": "e"},
                        ]
                    }
                ).encode()
            },
            "e",
        ),
    ],
)
def test_the_template_is_found_wherever_it_stands(
    parts: dict[str, bytes], template: str | None
) -> None:
    assert TokenizerFiles.from_parts({"tokenizer.json": b"{}", **parts}).chat_template() == template


def test_the_byte_tokenizer_is_the_same_in_python_and_as_a_file() -> None:
    files = byte_tokenizer_files()
    plain, read = ByteCodec(), HuggingFaceCodec(files)

    for text in TEXTS:
        assert plain.encode(text) == read.encode(text)
        assert plain.encode_whole(text) == read.encode_whole(text)
    for skip in (False, True):
        ids = [*range(256), *range(256, VOCAB_SIZE)]
        assert plain.decode(ids, skip) == read.decode(ids, skip)
    assert [plain.token_bytes(i) for i in range(VOCAB_SIZE)] == [
        read.token_bytes(i) for i in range(VOCAB_SIZE)
    ]
    assert plain.vocab_size == read.vocab_size
    assert plain.added_tokens == read.added_tokens
    assert Tokenizer.from_str(files.parts["tokenizer.json"].decode()).get_vocab_size() == VOCAB_SIZE


def test_the_byte_tokenizers_digest_is_the_golden_one() -> None:
    # Routers know the built-in tokenizer by it.
    assert byte_tokenizer_files().digest == "83885d46975d214b8454266d1a96db5e"
