"""The files that turn a prompt into tokens, as one value with a digest.

An engine reads them from its model's folder; a router gets the same bytes over `GetTokenizer`.
Equal digests mean equal tokens, so nothing that is not about text belongs in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE_JINJA = "chat_template.jinja"
CHAT_TEMPLATE_JSON = "chat_template.json"
FILE_NAMES = (
    TOKENIZER_JSON,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    GENERATION_CONFIG,
    CHAT_TEMPLATE_JINJA,
    CHAT_TEMPLATE_JSON,
)
_MODEL_CONFIG = "config.json"
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """File names and contents. Unknown names are refused, so that a digest means one thing."""

    parts: Mapping[str, bytes]
    digest: str = field(init=False)
    """Hex, of all names and contents."""

    def __post_init__(self) -> None:
        if TOKENIZER_JSON not in self.parts:
            raise ValueError(f"there is no {TOKENIZER_JSON}")
        if unknown := sorted(set(self.parts) - set(FILE_NAMES)):
            raise ValueError(f"{unknown[0]!r} is not one of the tokenizer files")
        parts = {name: bytes(self.parts[name]) for name in sorted(self.parts)}
        object.__setattr__(self, "parts", MappingProxyType(parts))
        object.__setattr__(self, "digest", _digest(parts))

    @classmethod
    def from_parts(cls, parts: Mapping[str, bytes]) -> TokenizerFiles:
        """Raises ValueError when `tokenizer.json` is missing or a name is unknown."""
        return cls(parts)

    @classmethod
    def from_folder(cls, folder: Path) -> TokenizerFiles:
        """Read a model's folder. Raises FileNotFoundError when it has no `tokenizer.json`, and
        ValueError when `config.json` is needed and broken.

        The ids of the end tokens stand in `generation_config.json`, or else in the model's
        `config.json`; in the latter case the ids alone are taken over.
        """
        if not (folder / TOKENIZER_JSON).is_file():
            raise FileNotFoundError(f"{folder} has no {TOKENIZER_JSON}")
        paths = {name: folder / name for name in FILE_NAMES}
        parts = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
        config = folder / _MODEL_CONFIG
        if GENERATION_CONFIG not in parts and config.is_file():
            settings = _json_object(_MODEL_CONFIG, config.read_bytes())
            ids = {name: settings[name] for name in _SPECIAL_IDS if settings.get(name) is not None}
            parts[GENERATION_CONFIG] = msgspec.json.encode(ids)
        return cls(parts)

    def read_json(self, name: str) -> dict[str, Any]:
        """The object in a file; empty without the file. Raises ValueError if it is no object."""
        data = self.parts.get(name)
        return {} if data is None else _json_object(name, data)

    def special_tokens(self) -> dict[str, str]:
        """Named special tokens, such as `bos_token`: the variables that a chat template sees."""
        merged = self.read_json(SPECIAL_TOKENS_MAP) | self.read_json(TOKENIZER_CONFIG)
        named: dict[str, str] = {}
        for name, value in merged.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                named[name] = content
        return named

    def chat_template(self) -> str | None:
        """The Jinja source; of several named ones the default."""
        if CHAT_TEMPLATE_JINJA in self.parts:
            return self.parts[CHAT_TEMPLATE_JINJA].decode()
        template = self.read_json(CHAT_TEMPLATE_JSON).get("chat_template")
        if template is None:
            template = self.read_json(TOKENIZER_CONFIG).get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        return template if isinstance(template, str) else None


def _json_object(name: str, data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds no JSON object")
    return value


def _digest(parts: Mapping[str, bytes]) -> str:
    hasher = blake2b(digest_size=16, person=b"kvoy-tokenizer")
    for name, data in parts.items():
        for item in (name.encode(), data):
            hasher.update(len(item).to_bytes(8, "little"))
            hasher.update(item)
    return hasher.hexdigest()
