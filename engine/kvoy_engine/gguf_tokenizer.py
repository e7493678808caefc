"""The tokenizer files of a GGUF: `tokenizer.json` and `tokenizer_config.json` from its metadata.

A GGUF has no `tokenizer.json`; it lists tokens, merges or scores, and names the rule that splits
text before merging (`tokenizer.ggml.pre`). The rules here are those of the models' own
`tokenizer.json` files. An unknown rule is refused by name: a guess would split some texts wrongly.

Pure functions on a metadata mapping. Called by `gguf_convert`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvoy_engine.model_errors import ModelSourceError

Metadata = Mapping[str, Any]
Json = dict[str, Any]

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_SPACE = "▁"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL: Json = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def _split_rule(pattern: str) -> Json:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTE_LEVEL, "use_regex": False}]}


_PRE_TOKENIZERS: dict[str, Json] = {
    "gpt-2": _BYTE_LEVEL,
    "default": _BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
    "llama-bpe": _split_rule(_LLAMA3_SPLIT),
    "llama3": _split_rule(_LLAMA3_SPLIT),
    "llama-v3": _split_rule(_LLAMA3_SPLIT),
    "qwen2": _split_rule(_QWEN2_SPLIT),
    "deepseek-r1-qwen": _split_rule(_QWEN2_SPLIT),
    "tekken": _split_rule(_TEKKEN_SPLIT),
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Vocabularies where a word that is itself a token is taken whole, whatever its merges say."""
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Vocabularies learned on text in Unicode normal form C."""


def tokenizer_json(metadata: Metadata) -> Json:
    """The content of `tokenizer.json`. Raises ModelSourceError for a kind that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level_parts(metadata)
    elif kind == "llama":
        parts = _sentencepiece_parts(metadata)
    else:
        raise ModelSourceError(
            f"this GGUF has a tokenizer of kind {kind!r}; Kvoy reads the kinds 'gpt2' and 'llama'"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _post_processor(metadata, parts["post_processor"]),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }


def tokenizer_config(metadata: Metadata) -> Json:
    """The content of `tokenizer_config.json`: special tokens by name, and the chat template."""
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(metadata),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = special_id(metadata, key)
        if token_id is not None:
            config[f"{name}_token"] = metadata["tokenizer.ggml.tokens"][token_id]
    template = metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def special_id(metadata: Metadata, key: str) -> int | None:
    """The id of the `bos`, `eos`, `eot`, `unknown` or `padding` token, if the file names one."""
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return None if value is None else int(value)


def adds_bos(metadata: Metadata) -> bool:
    """Whether text begins with the BOS token; sentencepiece vocabularies say so by default."""
    default = metadata.get("tokenizer.ggml.model") == "llama" or _pre(metadata) in (
        _WHOLE_WORDS_FIRST
    )
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _pre(metadata: Metadata) -> str:
    return str(metadata.get("tokenizer.ggml.pre", "default"))


def _vocabulary(metadata: Metadata) -> dict[str, int]:
    """Token to id, without the placeholders that only pad the embedding table."""
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    return {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != _UNUSED
    }


def _byte_level_parts(metadata: Metadata) -> Json:
    pre = _pre(metadata)
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelSourceError(
            f"this GGUF splits text by the rule {pre!r} (tokenizer.ggml.pre), which Kvoy does not "
            f"know; it knows {known}"
        )
    merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": {**_BYTE_LEVEL, "trim_offsets": False},
        "decoder": _BYTE_LEVEL,
        "model": _bpe(_vocabulary(metadata), merges, ignore_merges=pre in _WHOLE_WORDS_FIRST),
    }


def _sentencepiece_parts(metadata: Metadata) -> Json:
    vocabulary = _vocabulary(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    unknown = special_id(metadata, "unknown")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizers: list[Json] = [replace]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizers = [{"type": "Prepend", "prepend": _SPACE}, replace]
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _bpe(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def merges_by_score(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[list[str]]:
    """The merges that a sentencepiece vocabulary implies: into better-scored tokens first.

    A token is reachable through each pair of tokens that spell it; ties go to
    the longer left part, then to the lower ids.
    """
    ranked: list[tuple[float, int, int, int, int, int, str, str]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                order = (-scores[token], -len(left), -len(right), index)
                ranked.append((*order, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [[entry[-2], entry[-1]] for entry in ranked]


def _added_tokens(metadata: Metadata) -> list[Json]:
    """Control tokens as special ones; user-defined tokens (`<think>`) as plain ones, kept whole."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _post_processor(metadata: Metadata, otherwise: Json | None) -> Json | None:
    """Puts the BOS token before a text where the model wants it."""
    bos = special_id(metadata, "bos")
    if not adds_bos(metadata) or bos is None:
        return otherwise
    token = metadata["tokenizer.ggml.tokens"][bos]
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            begin,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": token, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }
    if otherwise is None:
        return template
    return {"type": "Sequence", "processors": [otherwise, template]}
