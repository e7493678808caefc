"""`kvoy model`: list the models on this machine, add one under a name, convert a GGUF file, and
fetch one of a hub into a folder.

`fetch` runs in images that have the engine alone: what paints on terminals is imported by the
others.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoy_cli.errors import CommandError
from kvoy_contract.settings import read_settings, setting
from kvoy_engine import home, hub, last_words, model_fetch, model_store
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
  fetch    download a hub's model into a folder of its own, once

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
class FetchConfig:
    uri: str = setting(positional=True, metavar="URI", help="hf://org/name or hf://org/name@REV")
    to: str = setting(metavar="DIR", help="the folder that becomes the model's")
    revision: str | None = setting(None, help="branch, tag or commit, where URI names none")


@dataclass(frozen=True, slots=True)
class ListConfig:
    """Nothing to choose."""


def main(argv: Sequence[str]) -> int:
    commands: dict[str, Callable[[list[str]], None]] = {
        "list": list_models,
        "add": add_model,
        "convert": convert_model,
        "fetch": fetch_model,
    }
    arguments = list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if arguments[0] not in commands:
        print(f"kvoy model: no command {arguments[0]!r}\n\n{USAGE}", file=sys.stderr)
        return 2
    home.provide_folders(os.environ)
    try:
        commands[arguments[0]](arguments[1:])
    except ModelSourceError as error:
        raise CommandError(str(error)) from error
    return 0


def list_models(argv: list[str]) -> None:
    read_settings(
        ListConfig, "kvoy model list", "Print the built-in and the prepared models.", argv
    )
    from kvoy_cli.console import Reporter

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
    from kvoy_cli.console import Reporter

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


class FetchFailed(CommandError):
    """Its status says what kind of failure it was."""

    def __init__(self, error: ModelSourceError) -> None:
        super().__init__(str(error))
        self.status = error.cause.value


def fetch_model(argv: list[str]) -> None:
    config = read_settings(
        FetchConfig,
        "kvoy model fetch",
        "Download a hub's model into a folder, which is whole or absent, and print the folder. "
        "Of several that do so at once, on one machine or on many that share the folder, one "
        "downloads; files that an interrupted one has brought are kept. HF_TOKEN, HF_ENDPOINT and "
        "HF_HOME mean what they always mean. Exit status: 3 the hub has no such model, 4 it needs "
        "another token, 5 too many requests, 6 the hub cannot be reached, 7 no disk space, 8 "
        "damaged, 1 anything else.",
        argv,
    )
    report = FetchLines()
    try:
        reference = fetched_reference(config)
        folder = model_fetch.fetch(
            reference, Path(config.to).expanduser().absolute(), report.say, report.fraction
        )
    except ModelSourceError as error:
        last_words.leave("ModelLoadFailed", str(error), os.environ)
        raise FetchFailed(error) from error
    print(folder)


def fetched_reference(config: FetchConfig) -> hub.HubReference:
    """Raises ModelSourceError for what is no model of a hub, or has two revisions."""
    if not config.uri.startswith(hub.SCHEME):
        raise ModelSourceError(f"{config.uri!r} is not of the form hf://org/name@revision")
    reference = hub.parse_reference(config.uri)
    if config.revision is None:
        return reference
    if "@" in config.uri and reference.revision != config.revision:
        raise ModelSourceError(f"--revision {config.revision} is not the revision of {config.uri}")
    return hub.parse_reference(f"{hub.SCHEME}{reference.repo}@{config.revision}")


class FetchLines:
    """Progress as lines for a log: what is done now, and every few seconds how far it is."""

    EVERY_S = 5.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_s = clock()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._said_s = self._clock()

    def fraction(self, value: float) -> None:
        if self._clock() - self._said_s >= self.EVERY_S:
            self.say(f"{value:.0%} downloaded")


def convert_model(argv: list[str]) -> None:
    config = read_settings(
        ConvertConfig,
        "kvoy model convert",
        "Write config, tokenizer and safetensors weights of a GGUF file to a folder.",
        argv,
    )
    from kvoy_cli.console import Reporter
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
