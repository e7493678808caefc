"""From plain text to token ids and back, below all rules about prompts.

`Codec` is what `prompt` and the detokenizer need of a tokenizer. `HuggingFaceCodec` is one over a
`tokenizer.json`; `byte_tokenizer.ByteCodec` is another without any dependency.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kvoy_contract.tokenizer_files import TOKENIZER_JSON, TokenizerFiles

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in text as a whole, before the model of the tokenizer sees the rest."""

    id: int
    content: str
    is_special: bool
    """Special tokens steer the model; they are left out of shown text."""
    takes_left_space: bool = False
    """White space before it belongs to it."""
    takes_right_space: bool = False


class Codec(Protocol):
    @property
    def vocab_size(self) -> int:
        """The greatest id, plus 1."""
        ...

    @property
    def added_tokens(self) -> Mapping[int, AddedToken]: ...

    @property
    def prefix_ids(self) -> Sequence[int]:
        """What stands before a plain text: the beginning-of-text token, for most models."""
        ...

    @property
    def suffix_ids(self) -> Sequence[int]: ...

    @property
    def is_byte_exact(self) -> bool:
        """Whether the text of ids is the UTF-8 text of their `token_bytes`, one after the other."""
        ...

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's own beginning has one space less than its first token's bytes."""
        ...

    def encode(self, text: str) -> list[int]:
        """Text alone: a special token's name in it is ordinary text, nothing is put around it."""
        ...

    def encode_whole(self, text: str) -> list[int]:
        """Special tokens in the text become their ids; nothing is put around it."""
        ...

    def probe_whole(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_whole` of each text; only before another thread uses this codec."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in the middle of a text; empty for an unknown id."""
        ...

    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text than this; 0 when that is not known."""
        ...


class _ModelHead(msgspec.Struct):
    type: str = "BPE"


class _TokenizerHead(msgspec.Struct):
    """The small parts of a tokenizer.json; its vocabulary is passed over."""

    model: _ModelHead
    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None


class HuggingFaceCodec:
    """A `tokenizer.json`, read by the `tokenizers` library. Safe to use from several threads."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Raises ValueError when the files make no tokenizer."""
        # One text is one thread's work: without this the library starts a thread per core, and
        # warns at every fork after it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer  # a timing engine with the byte tokenizer does without

        source = files.parts[TOKENIZER_JSON]
        try:
            head = msgspec.json.decode(source, type=_TokenizerHead)
            self._source = source.decode()
            self._tokenizer: Tokenizer = Tokenizer.from_str(self._source)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ValueError(f"{TOKENIZER_JSON} cannot be read: {error}") from error
        self._files = files
        self._decoder_kinds = _kinds(head.decoder)
        self._strips = _strips_first_space(head.decoder)
        self._has_normalizer = head.normalizer is not None
        self._prepare(self._tokenizer)
        self._whole: Tokenizer | None = None
        self._added = _added_tokens(self._tokenizer)
        self._vocab_size = _vocab_size(self._tokenizer)
        self._prefix_ids, self._suffix_ids = self._surroundings()
        self._bytes: dict[int, bytes] = {}
        self._longest = 0
        self._byte_level = "ByteLevel" in self._decoder_kinds
        self._metaspace = bool({"ByteFallback", "Metaspace"} & set(self._decoder_kinds))

    def _prepare(self, tokenizer: Tokenizer) -> None:
        """As transformers does: no cutting or padding, and all named special tokens are special."""
        from tokenizers import AddedToken as LibraryToken

        tokenizer.no_truncation()
        tokenizer.no_padding()
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        missing = [
            LibraryToken(content, special=True, normalized=False)
            for content in self._files.special_tokens().values()
            if content not in known and tokenizer.token_to_id(content) is not None
        ]
        if missing:
            tokenizer.add_special_tokens(missing)
        tokenizer.encode_special_tokens = True

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts around a text; as in transformers, it alone decides."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def added_tokens(self) -> Mapping[int, AddedToken]:
        return self._added

    @property
    def prefix_ids(self) -> Sequence[int]:
        return self._prefix_ids

    @property
    def suffix_ids(self) -> Sequence[int]:
        return self._suffix_ids

    @property
    def is_byte_exact(self) -> bool:
        return self._byte_level or self._metaspace

    @property
    def strips_first_space(self) -> bool:
        return self._metaspace and self._strips

    def encode(self, text: str) -> list[int]:
        return _encode(self._tokenizer, text)

    def encode_whole(self, text: str) -> list[int]:
        """Through a second copy of the tokenizer, made at the first call: how special tokens are
        read is a switch of the whole object, which other threads use.
        """
        if self._whole is None:
            from tokenizers import Tokenizer

            whole = Tokenizer.from_str(self._source)
            self._prepare(whole)
            whole.encode_special_tokens = False
            self._whole = whole
        return _encode(self._whole, text)

    def probe_whole(self, texts: Sequence[str]) -> list[list[int]]:
        self._tokenizer.encode_special_tokens = False
        try:
            return [_encode(self._tokenizer, text) for text in texts]
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._token_bytes(token_id)
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_level:
            return byte_level_bytes(token)
        if self._metaspace:
            if (
                len(token) == 6
                and token.startswith("<0x")
                and "ByteFallback" in self._decoder_kinds
            ):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def longest_token_bytes(self) -> int:
        if not self._longest and self._byte_level and not self._has_normalizer:
            self._longest = max(map(len, self._tokenizer.get_vocab()))
        return self._longest


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """As a batch of one: only then does the library let other threads of Python run meanwhile."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _added_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    return {
        token_id: AddedToken(token_id, t.content, t.special, t.lstrip, t.rstrip)
        for token_id, t in tokenizer.get_added_tokens_decoder().items()
    }


def _vocab_size(tokenizer: Tokenizer) -> int:
    added = tokenizer.get_added_tokens_decoder()
    return max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)


def _kinds(component: dict[str, Any] | None) -> list[str]:
    """The types of a component of a tokenizer.json, with those inside a sequence."""
    if component is None:
        return []
    kinds = [str(component.get("type"))]
    for name in ("decoders", "normalizers", "pretokenizers"):
        for part in component.get(name, ()):
            kinds += _kinds(part)
    return kinds


def _strips_first_space(decoder: dict[str, Any] | None) -> bool:
    match decoder:
        case {"type": "Sequence", "decoders": parts}:
            return any(_strips_first_space(part) for part in parts)
        case {"type": "Strip", "start": start}:
            return bool(start)
        case {"type": "Metaspace", "prepend_scheme": scheme}:
            return bool(scheme != "never")
    return False


def byte_level_alphabet() -> dict[int, str]:
    """GPT-2's printable character for every byte: its own where it has one, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(256 + len(alphabet) - len(printable))
    return alphabet


_BYTE_OF_CHAR = {char: byte for byte, char in byte_level_alphabet().items()}


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; of a token with other characters, its own UTF-8."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()
