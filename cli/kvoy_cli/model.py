"""`kvoy model`: list the models on this machine, add one under a name, convert a GGUF file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoy_cli.console import Reporter
from kvoy_cli.errors import CommandError
from kvoy_contract.settings import read_settings, setting
from kvoy_engine import model_store
from kvoy_engine.model_errors import ModelSourceError

DTYPES = ("auto", "float32", "float16", "bfloat16")
DTYPE_HELP = "stored type of a GGUF's weights; auto is the smallest that keeps every value"

USAGE = """\
usage: kvoy model COMMAND ...

Models on this machine. They live under $KVOY_HOME/models (~/.cache/kvoy/models by default).

commands:
  list     models by name: built in, and prepared here
  add      get a model now (fetch, convert or link), and give it a name
  convert  turn a GGUF file into a model folder

options:
  --help   this text; `kvoy model COMMAND --help` has a command's options"""


@dataclass(frozen=True, slots=True)
class AddConfig:
    model: str = setting(
        positional=True,
        metavar="MODEL",
        help="built-in name, folder, GGUF file or hf://org/name@revision",
    )
    name: str | None = setting(None, help="name for `kvoy up NAME` (default: from MODEL)")
    stored_dtype: str = setting("auto", choices=DTYPES, help=DTYPE_HELP)


@dataclass(frozen=True, slots=True)
class ConvertConfig:
    gguf: str = setting(positional=True, metavar="GGUF", help="a .gguf file")
    folder: str = setting(positional=True, metavar="FOLDER", help="the folder to make")
    stored_dtype: str = setting("auto", choices=DTYPES, help=DTYPE_HELP)


@dataclass(frozen=True, slots=True)
class ListConfig:
    """Nothing to choose."""


def main(argv: Sequence[str]) -> int:
    commands: dict[str, Callable[[list[str]], None]] = {
        "list": list_models,
        "add": add_model,
        "convert": convert_model,
    }
    arguments = list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if arguments[0] not in commands:
        print(f"kvoy model: no command {arguments[0]!r}\n\n{USAGE}", file=sys.stderr)
        return 2
    try:
        commands[arguments[0]](arguments[1:])
    except ModelSourceError as error:
        raise CommandError(str(error)) from error
    return 0


def list_models(argv: list[str]) -> None:
    read_settings(
        ListConfig, "kvoy model list", "Print the built-in and the prepared models.", argv
    )
    report = Reporter()
    for model in model_store.stored_models():
        where = f"{model.num_bytes / 1e6:,.0f} MB" if model.folder else "not fetched"
        report.print(f"{model.name:32}  {where:>12}  {model.description or model.source}")


def add_model(argv: list[str]) -> None:
    config = read_settings(
        AddConfig,
        "kvoy model add",
        "Fetch, convert or link a model now, so that a later start finds it ready.",
        argv,
    )
    with Reporter().tasks() as new_task:
        task = new_task(f"looking for {config.model}")
        name = config.name or model_store.entry_name(config.model)
        if name is None:
            folder = model_store.resolve(config.model, task.say, task.fraction)
        else:
            folder = model_store.add(
                name, config.model, task.say, task.fraction, config.stored_dtype
            )
        task.done(f"{config.model} in {folder}")


def convert_model(argv: list[str]) -> None:
    config = read_settings(
        ConvertConfig,
        "kvoy model convert",
        "Write config, tokenizer and safetensors weights of a GGUF file to a folder.",
        argv,
    )
    from kvoy_engine.gguf_convert import choose_dtype, convert, open_gguf

    gguf, target = Path(config.gguf), Path(config.folder)
    if target.exists():
        raise CommandError(f"{target} exists already")
    if not gguf.is_file():
        raise CommandError(f"there is no file {gguf}")
    partial = target.with_name(f".{target.name}.partial")
    with Reporter().tasks() as new_task:
        task = new_task(f"converting {gguf}")
        file = open_gguf(gguf)
        dtype = choose_dtype(file) if config.stored_dtype == "auto" else config.stored_dtype
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            convert(file, partial, dtype, task.fraction)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        task.done(f"{gguf} as {dtype} in {target}")
