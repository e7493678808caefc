"""The built-in tokenizer of the timing engine: an id below 256 is a byte of UTF-8, four more are
special.

It is a `Codec` in plain Python, and `byte_tokenizer_files` is the same tokenizer as a
`tokenizer.json`, so that whoever reads those files with the `tokenizers` library gets the same ids.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

import msgspec

from kvoy_contract.codec import AddedToken, byte_level_alphabet
from kvoy_contract.tokenizer_files import (
    CHAT_TEMPLATE_JINJA,
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    TokenizerFiles,
)

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)
NUM_BYTES = 256
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
END_IDS = (NUM_BYTES + 2, NUM_BYTES)
"""Of `<|im_end|>` and `<|endoftext|>`."""

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


class ByteCodec:
    """See `codec.Codec` for the meaning of its members."""

    vocab_size = VOCAB_SIZE
    prefix_ids: Sequence[int] = ()
    suffix_ids: Sequence[int] = ()
    is_byte_exact = True
    strips_first_space = False

    def __init__(self) -> None:
        ids = range(NUM_BYTES, VOCAB_SIZE)
        pairs = zip(ids, SPECIAL_TOKENS, strict=True)
        self.added_tokens: Mapping[int, AddedToken] = {
            token_id: AddedToken(token_id, content, is_special=True) for token_id, content in pairs
        }
        self._id_of = {token.content: token.id for token in self.added_tokens.values()}
        self._special = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_whole(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._special.split(text):
            special = self._id_of.get(piece)
            ids += self.encode(piece) if special is None else [special]
        return ids

    def probe_whole(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_whole(text) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i >= NUM_BYTES)]
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < NUM_BYTES:
            return bytes([token_id])
        added = self.added_tokens.get(token_id)
        return added.content.encode() if added is not None else b""

    def longest_token_bytes(self) -> int:
        return max(map(len, SPECIAL_TOKENS))


@functools.cache
def byte_tokenizer_files() -> TokenizerFiles:
    """The same tokenizer for readers of a `tokenizer.json`; a byte-level BPE without merges."""
    vocab = {char: byte for byte, char in byte_level_alphabet().items()}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_library_token(NUM_BYTES + i, t) for i, t in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    config = {"eos_token": MESSAGE_END, "tokenizer_class": "PreTrainedTokenizerFast"}
    return TokenizerFiles.from_parts(
        {
            TOKENIZER_JSON: msgspec.json.encode(tokenizer),
            TOKENIZER_CONFIG: msgspec.json.encode(config),
            GENERATION_CONFIG: msgspec.json.encode({"eos_token_id": END_IDS}),
            CHAT_TEMPLATE_JINJA: _CHAT_TEMPLATE.encode(),
        }
    )


def _library_token(token_id: int, content: str) -> dict[str, object]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
