"""Frozen dataclasses read from plain values, unknown keys refused.

msgspec refuses unknown keys of its own structs alone, and the configuration of the serving parts is
made of dataclasses. So each dataclass gets a struct with the same fields, types and defaults, made
from it at run time: there is no second list of fields. A union of dataclasses is told apart by the
key `kind`, the class' name in words with hyphens (`EngineDies` is `engine-dies`).
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import msgspec

T = TypeVar("T")


class Mirror(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the structs; each stands for one dataclass."""

    of: ClassVar[type[Any]]

    def build(self) -> Any:
        """The dataclass with these values; raises what its validation raises."""
        return self.of(**{name: _built(getattr(self, name)) for name in self.__struct_fields__})

    def __post_init__(self) -> None:
        self.build()  # so that msgspec reports a refused value with its place in the file


def convert(value: Any, to: type[T]) -> T:
    """Build the dataclass `to` from mappings and lists.

    Raises msgspec.ValidationError, naming the place and the field: for an unknown or missing key, a
    wrong type, or a value that the dataclass' own validation refuses.
    """
    # mypy takes a type variable's class for unhashable.
    built: T = msgspec.convert(value, mirror_of(to)).build()  # type: ignore[arg-type]
    return built


def kind_of(dataclass: type[Any]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", dataclass.__name__).lower()


@lru_cache(maxsize=256)
def mirror_of(dataclass: type[Any], tag: str | None = None) -> type[Mirror]:
    hints = typing.get_type_hints(dataclass)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for field in dataclasses.fields(dataclass):
        hint = _mirrored(hints[field.name])
        if field.default is not dataclasses.MISSING:
            fields.append((field.name, hint, field.default))
        elif field.default_factory is not dataclasses.MISSING:
            default = msgspec.field(default_factory=field.default_factory)
            fields.append((field.name, hint, default))
        else:
            fields.append((field.name, hint))
    return msgspec.defstruct(  # type: ignore[return-value] # its stub forgets the bases
        dataclass.__name__,
        fields,
        bases=(Mirror,),
        namespace={"of": dataclass},
        tag_field="kind" if tag else None,
        tag=tag,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _mirrored(hint: Any) -> Any:
    """The hint with every dataclass in it replaced by its struct."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return mirror_of(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        is_tagged = sum(map(dataclasses.is_dataclass, arguments)) > 1
        return typing.Union[tuple(_member(a, is_tagged) for a in arguments)]  # noqa: UP007
    if origin is tuple:
        return types.GenericAlias(tuple, tuple(_mirrored(argument) for argument in arguments))
    return hint


def _member(hint: Any, is_tagged: bool) -> Any:
    if is_tagged and dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return mirror_of(hint, kind_of(hint))
    return _mirrored(hint)


def _built(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_built(item) for item in value)
    return value.build() if isinstance(value, Mirror) else value
