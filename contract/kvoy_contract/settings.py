"""One frozen dataclass is a component's whole configuration: flags, environment, file.

A field declared with `setting(...)` becomes `--the-field`, `KVOY_THE_FIELD` and the key `the-field`
of the YAML file given by `--config`, in this order of precedence. An unknown flag or key is an
error. Reading happens once, in a composition root; nothing else looks at the environment.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import configargparse

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
        options["choices"] = list(meta["choices"])
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
    """Build the dataclass from parsed arguments; its `__post_init__` validates, naming fields."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        value = getattr(namespace, field.name)
        if value is None and field.default is not dataclasses.MISSING:
            value = field.default
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return config_type(**values)


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


def read_settings(
    config_type: type[T], prog: str, description: str, argv: Sequence[str] | None
) -> T:
    """Parse `argv`, the environment and the configuration file; exits 2 with a line on a bad value
    (BadSetting).

    A `ValueError` from the dataclass' own validation is reported the same way.
    """
    parser = _Parser(
        prog=prog,
        description=description,
        config_file_parser_class=configargparse.YAMLConfigFileParser,
        formatter_class=configargparse.HelpFormatter,
        add_config_file_help=False,
        epilog="The command line wins over the environment, the environment over the file.",
    )
    add_settings(parser, config_type)
    namespace = parser.parse_args(argv)
    try:
        return from_namespace(config_type, namespace)
    except ValueError as error:
        parser.error(str(error))
