"""One frozen dataclass is a component's whole configuration: flags, environment, file.

A field declared with `setting(...)` becomes `--the-field`, `KVOY_THE_FIELD` and the key `the-field`
of the YAML file given by `--config`, in this order of precedence. An unknown flag or key is an
error. Reading happens in a composition root; nothing else looks at the environment. A component
that follows its file has `Settings.reread` for a new text of it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import configargparse

from kvoy_contract.settings_file import Kind, read_document

ENV_PREFIX = "KVOY_"
T = TypeVar("T")


def setting(default: Any = dataclasses.MISSING, *, help: str, **extra: Any) -> Any:
    """A configuration field. `extra` may hold `choices`, `metavar`, `positional`, `env`, `flag`.

    `help` states the meaning, the unit and why this default. Without `default` the flag is
    required.
    """
    metadata = {"help": help, **extra}
    if isinstance(default, list | dict | set):
        raise TypeError("a frozen configuration takes immutable defaults")
    return dataclasses.field(default=default, metadata=metadata)


def add_settings(parser: configargparse.ArgumentParser, config_type: type[Any]) -> None:
    """Add one option per field of `config_type`, and `--config FILE`."""
    hints = typing.get_type_hints(config_type)
    parser.add_argument(
        "--config",
        is_config_file=True,
        metavar="FILE",
        env_var=f"{ENV_PREFIX}CONFIG",
        help="YAML file whose keys are the names of these flags",
    )
    for field in dataclasses.fields(config_type):
        _add_setting(parser, field, hints[field.name])


def _add_setting(
    parser: configargparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any
) -> None:
    meta = dict(field.metadata)
    value_type, is_optional, is_list = _unwrap(hint)
    has_default = field.default is not dataclasses.MISSING
    name = meta.get("flag", field.name.replace("_", "-"))
    options: dict[str, Any] = {
        "help": _help_text(meta["help"], field.default, has_default and not is_optional),
        "env_var": meta.get("env", f"{ENV_PREFIX}{name.replace('-', '_').upper()}"),
    }
    if has_default:
        options["default"] = field.default
    if "choices" in meta:
        options["choices"] = list(map(str, meta["choices"]))
    if value_type is bool:
        options["action"] = configargparse.argparse.BooleanOptionalAction
    else:
        options["type"] = value_type
        options["metavar"] = meta.get("metavar") or (
            None if "choices" in meta else value_type.__name__.upper()
        )
    if is_list:
        # Repeated flags add up. The default comes in `from_namespace`: argparse would add to it.
        options |= {"nargs": "*", "action": "extend", "default": None}
    if meta.get("positional"):
        options.pop("env_var")
        options["metavar"] = meta.get("metavar") or field.name.upper()
        if has_default:
            options["nargs"] = "?"
        parser.add_argument(field.name, **options)
        return
    if not has_default:
        options["required"] = True
    parser.add_argument(f"--{name}", dest=field.name, **options)


def _unwrap(hint: Any) -> tuple[type[Any], bool, bool]:
    """(value type, may be None, is a tuple of values) of a field's type."""
    is_optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        arguments = [a for a in typing.get_args(hint) if a is not type(None)]
        is_optional = len(arguments) < len(typing.get_args(hint))
        (hint,) = arguments
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], is_optional, True
    return hint, is_optional, False


def _help_text(text: str, default: Any, show_default: bool) -> str:
    escaped = text.replace("%", "%%")
    if not show_default or default in ("", ()):
        return escaped
    return f"{escaped} (default: {default})"


def from_namespace(config_type: type[T], namespace: Any) -> T:
    """Build the dataclass from parsed arguments. Its `__post_init__` validates, naming fields; the
    ValueError that is raised here names the flags that they are for whoever starts the process."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        value = getattr(namespace, field.name)
        if value is None and field.default is not dataclasses.MISSING:
            value = field.default
        values[field.name] = tuple(value) if isinstance(value, list) else value
    try:
        return config_type(**values)
    except ValueError as error:
        names, colon, rest = str(error).partition(": ")
        if all(name in values for name in names.split(", ")):
            names = names.replace("_", "-")
        raise ValueError(f"{names}{colon}{rest}") from None


class BadSetting(SystemExit):
    """Ends the process with status 2; its line, which holds `reason`, has been printed."""

    def __init__(self, reason: str) -> None:
        super().__init__(2)
        self.reason = reason


class _Parser(configargparse.ArgumentParser):  # type: ignore[misc] # has no types
    """Says what is wrong in one line: the usage of a component is a page."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise BadSetting(message)


class _RaisingParser(configargparse.ArgumentParser):  # type: ignore[misc] # has no types
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class Settings(Generic[T]):
    """What a process was started with. Its file may change, its arguments and environment do not,
    and they stand over the file at every time."""

    def __init__(
        self, config_type: type[T], prog: str, description: str, argv: Sequence[str] | None
    ) -> None:
        """Exits 2 with a line on a bad value (BadSetting)."""
        self._config_type = config_type
        self._argv = list(sys.argv[1:] if argv is None else argv)
        self._environ: Mapping[str, str] = dict(os.environ)
        parser = self._parser(_Parser, prog, description)
        namespace = parser.parse_args(self._argv, env_vars=self._environ)
        try:
            self.values = from_namespace(config_type, namespace)
        except ValueError as error:
            parser.error(str(error))
        self.file: Path | None = None if namespace.config is None else Path(namespace.config)

    def reread(self, text: str) -> T:
        """The configuration, were this the text of the file. Raises ValueError, which names the
        key and what is wrong with it."""
        parser = self._parser(_RaisingParser, "", "")
        namespace = parser.parse_args(self._argv, config_file_contents=text, env_vars=self._environ)
        return from_namespace(self._config_type, namespace)

    def _parser(self, parser_type: type[Any], prog: str, description: str) -> Any:
        config_type = self._config_type
        parser = parser_type(
            prog=prog,
            description=description,
            config_file_parser_class=_file_parser(config_type),
            formatter_class=configargparse.HelpFormatter,
            add_config_file_help=False,
            epilog="The command line wins over the environment, the environment over the file.",
        )
        add_settings(parser, config_type)
        return parser


def _file_parser(config_type: type[Any]) -> type[Any]:
    """Reads the file for configargparse, which takes texts and lists of them."""
    hints = typing.get_type_hints(config_type)
    kinds = {
        field.metadata.get("flag", field.name.replace("_", "-")): Kind(*_unwrap(hints[field.name]))
        for field in dataclasses.fields(config_type)
        if not field.metadata.get("positional")
    }

    class FileParser(configargparse.ConfigFileParser):  # type: ignore[misc] # has no types
        def get_syntax_description(self) -> str:
            return "YAML whose keys are the names of the flags."

        def parse(self, stream: typing.TextIO) -> dict[str, str | list[str]]:
            try:
                return read_document(stream.read(), kinds)
            except ValueError as error:
                raise configargparse.ConfigFileParserException(str(error)) from None

    return FileParser


def read_settings(
    config_type: type[T], prog: str, description: str, argv: Sequence[str] | None
) -> T:
    """Parse `argv`, the environment and the configuration file; exits 2 with a line on a bad value
    (BadSetting).

    A `ValueError` from the dataclass' own validation is reported the same way.
    """
    return Settings(config_type, prog, description, argv).values
