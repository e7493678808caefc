"""Our GGUF conversion against transformers' own: the same weights, the same token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvoy_engine import gguf_testing
from kvoy_engine.builtin_models import BUILTIN_MODELS, fetch_gguf
from kvoy_engine.gguf_convert import choose_dtype, convert, open_gguf

pytestmark = pytest.mark.slow

TEXTS = [
    "The capital of France is Paris.",
    "Hello  world!\n\n def f(x): return x**2  # ünïcødé 你好 🦀🦀",
    "<|im_start|>user\nHi<|im_end|>\n",
    " leading, trailing ",
    "a\u0301é\t\t\tx 3.14 I'm you'll WE'VE",
    "",
    "price: $1,234.56 (2024-02-29)",
    "العربية हिन्दी עברית ไทย",
]


def converted(gguf: Path, folder: Path) -> Path:
    folder.mkdir()
    file = open_gguf(gguf)
    convert(file, folder, choose_dtype(file), lambda fraction: None)
    return folder


def assert_equal_weights(gguf: Path, folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()

    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_tiny_models_have_transformers_weights(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    # qwen3 is not here: transformers takes its head size from a default, not from the file.
    gguf_testing.write_tiny_gguf(tmp_path / "tiny.gguf", architecture, tied=tied)

    assert_equal_weights(
        tmp_path / "tiny.gguf", converted(tmp_path / "tiny.gguf", tmp_path / "out")
    )


@pytest.mark.filterwarnings("ignore")
def test_the_built_in_model_has_transformers_weights_and_token_ids(tmp_path: Path) -> None:
    gguf = fetch_gguf(
        BUILTIN_MODELS["smollm2-135m-instruct"], tmp_path / "download", lambda text: None
    )

    folder = converted(gguf, tmp_path / "out")

    assert_equal_weights(gguf, folder)
    theirs = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ours = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == text
    assert ours.chat_template == theirs.chat_template
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)


@pytest.mark.filterwarnings("ignore")
def test_sentencepiece_text_has_transformers_token_ids(tmp_path: Path) -> None:
    gguf_testing.write_tiny_gguf(tmp_path / "tiny.gguf", tokenizer="llama")
    folder = converted(tmp_path / "tiny.gguf", tmp_path / "out")

    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    ours = AutoTokenizer.from_pretrained(folder)

    for text in ["hello", "hello hell world", "ünï 你好"]:
        assert ours.encode(text) == theirs.encode(text), text
