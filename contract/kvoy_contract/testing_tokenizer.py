"""Small real tokenizers for tests, trained in a moment on a few sentences.

They have what the tokenizers of real models have: byte-level or SentencePiece-like pieces, special
and other added tokens, a beginning-of-text token and a chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from kvoy_contract.tokenizer_files import TokenizerFiles

CORPUS = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "A router sends each request to the engine that already holds its work.",
    "What is between the brackets? Copy exactly what the user says, please.",
    "def answer(question):\n    return question.strip()\n\n\nprint(answer('why'))",
    "ďábel 访问 기계 héllo wörld naïve 🦙 👩‍👩‍👧‍👦",
    "1 2 3 4 5 6 7 8 9 10 2024 3.1415 <p>text</p> [x] (y) {z}",
)
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_TEMPLATE = "{{ bos_token }}" + CHATML_TEMPLATE


def byte_level_tokenizer(
    special: Sequence[str | AddedToken] = CHATML_TOKENS,
    others: Sequence[str] = (),
    vocab_size: int = 400,
) -> Tokenizer:
    """A byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(others))
    return tokenizer


def sentencepiece_tokenizer(
    special: Sequence[str] = ("<unk>", "<s>", "</s>"), first_only: bool = False
) -> Tokenizer:
    """A BPE over `▁` with byte fallback, as Llama 2 and Mistral have it.

    With `first_only` the space before a text belongs to its first piece alone.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    scheme = "first" if first_only else "always"
    if first_only:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS[:4], trainer)
    return _with_plain_bytes(tokenizer, special)


def _with_plain_bytes(tokenizer: Tokenizer, special: Sequence[str]) -> Tokenizer:
    """The byte tokens are ordinary pieces of the vocabulary, not special tokens."""
    source = json.loads(tokenizer.to_str())
    source["added_tokens"] = [t for t in source["added_tokens"] if t["content"] in special]
    return Tokenizer.from_str(json.dumps(source))


def tokenizer_files(
    tokenizer: Tokenizer,
    template: str | None = CHATML_TEMPLATE,
    config: Mapping[str, object] | None = None,
    generation_config: Mapping[str, object] | None = None,
) -> TokenizerFiles:
    """The files of a model that has this tokenizer."""
    settings = {"eos_token": "<|im_end|>", **(config or {})}
    parts = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }
    if template is not None:
        parts["chat_template.jinja"] = template.encode()
    if generation_config is not None:
        parts["generation_config.json"] = json.dumps(generation_config).encode()
    return TokenizerFiles.from_parts(parts)
