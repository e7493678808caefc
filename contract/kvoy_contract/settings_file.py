"""A configuration file: a flat YAML (so also JSON) document, checked key by key.

Whoever declares the settings says the keys and what each takes; see `settings`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml


class Kind(NamedTuple):
    """What a key takes."""

    value_type: type[Any]
    is_optional: bool
    is_list: bool


_WORDS: Mapping[type[Any], str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text (in quotes, where it looks like something else)",
}


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML's parsers silently take the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{key}: is given twice")
        return super().construct_mapping(node, deep=deep)


def read_document(text: str, kinds: Mapping[str, Kind]) -> dict[str, str | list[str]]:
    """Keys and their values, written as on a command line; null leaves an optional one out.

    Raises ValueError, which names the key and what it takes.
    """
    try:
        document = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {_place(error)}") from None
    if document is None:
        raise ValueError("the file is empty; `{}` stands for no settings")
    if not isinstance(document, dict):
        raise ValueError("the file must hold `key: value` lines")
    values: dict[str, str | list[str]] = {}
    for key, value in document.items():
        kind = kinds.get(key)
        if kind is None:
            raise ValueError(_unknown(str(key), kinds))
        if value is None and kind.is_optional:
            continue
        values[key] = _value(key, value, kind)
    return values


def _value(key: str, value: object, kind: Kind) -> str | list[str]:
    if not kind.is_list:
        return _scalar(key, value, kind)
    items = value if isinstance(value, list) else [value]
    return [_scalar(key, item, kind) for item in items]


def _scalar(key: str, value: object, kind: Kind) -> str:
    wanted = kind.value_type
    if wanted is float and isinstance(value, str):
        # YAML 1.1 takes 1e3 for a text.
        value = _number(value)
    is_right = (
        isinstance(value, int | float) and not isinstance(value, bool)
        if wanted is float
        else type(value) is wanted
    )
    if not is_right:
        # A text may be a secret.
        given = type(value).__name__ if wanted is str else repr(value)
        raise ValueError(f"{key}: must be {_WORDS[wanted]}, not {given}")
    return str(value).lower() if wanted is bool else str(value)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _unknown(key: str, kinds: Mapping[str, Kind]) -> str:
    close = difflib.get_close_matches(key, kinds, n=1)
    return f"{key}: unknown key" + (f"; {close[0]} is one" if close else "")


def _place(error: yaml.YAMLError) -> str:
    """Where it is wrong, without the line itself: that may hold what nobody should log."""
    mark = getattr(error, "problem_mark", None)
    return "cannot be read" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
