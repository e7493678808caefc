"""The `kvoy` command: finds the sub-command and hands the rest of the arguments over.

Knows names and one-line descriptions alone, so that `kvoy --help` is instant and a part that is not
installed is missed only when it is asked for. Every sub-command has a complete `--help` of its own.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoy_cli.errors import CommandError


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: what it is for, where its `main(argv) -> int` is, and what it needs."""

    summary: str
    module: str
    extra: str
    """The extra of the distribution that brings what the module imports."""


COMMANDS = {
    "up": Command("the whole stack on this machine: engines and a router", "kvoy_cli.up", "all"),
    "serve": Command("one engine: kvoy serve MODEL", "kvoy_engine.__main__", "engine"),
    "router": Command("one router over running engines", "kvoy_router.__main__", "router"),
    "operator": Command(
        "engines and routers of a Kubernetes cluster", "kvoy_operator.__main__", "operator"
    ),
    "chat": Command("talk to a running endpoint in the terminal", "kvoy_cli.chat", "cli"),
    "bench": Command("put load on a stack and report what it does", "kvoy_cli.bench", "all"),
    "simulate": Command(
        "a fleet in virtual time: compare policies, check goals", "kvoy_cli.simulate", "simulate"
    ),
    "model": Command("list, add and convert models", "kvoy_cli.model", "engine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the process' exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"kvoy {_version()}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        print(f"kvoy: no command {arguments[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    return _run(f"kvoy {arguments[0]}", command, arguments[1:])


def usage() -> str:
    width = len("--version") + 2
    commands = "\n".join(f"  {name:{width}}{c.summary}" for name, c in COMMANDS.items())
    return (
        "usage: kvoy COMMAND ...\n\n"
        "Distributed inference for large language models.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n"
        f"  {'--help':{width}}this text; `kvoy COMMAND --help` has a command's options\n"
        f"  {'--version':{width}}the installed version\n\n"
        "Every option --some-name is also the environment variable KVOY_SOME_NAME and the key\n"
        "some-name of the YAML file given by --config; the command line wins, then the environment."
    )


def _run(title: str, command: Command, argv: list[str]) -> int:
    try:
        return _load(command)(argv)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0].startswith("kvoy"):
            raise
        print(
            f"{title}: {error.name} is not installed: pip install 'kvoy[{command.extra}]'",
            file=sys.stderr,
        )
        return 1
    except CommandError as error:
        print(f"{title}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output left (`kvoy model list | head`); Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _load(command: Command) -> Callable[[list[str]], int]:
    main_function: Callable[[list[str]], int] = importlib.import_module(command.module).main
    return main_function


def _version() -> str:
    from importlib.metadata import version

    return version("kvoy")


if __name__ == "__main__":
    sys.exit(main())
