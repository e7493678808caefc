"""`kvoy up`: a router and several engines on this machine, from nothing to a first answer.

The story: check what can go wrong before anything runs, get the model, start the children, wait
until the router can route, ask one question, serve until Ctrl-C or SIGTERM, stop everything.
Whatever goes wrong on the way, every child is stopped before this command ends, with a status that
is not 0.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil

from kvoy_cli.children import Child, Children
from kvoy_cli.client import Answer, Endpoint
from kvoy_cli.console import Reporter, Task
from kvoy_cli.errors import CommandError
from kvoy_cli.ports import check_ports
from kvoy_cli.up_config import UpConfig, usable_cores
from kvoy_contract.settings import read_settings
from kvoy_engine.home import home
from kvoy_engine.model_errors import ModelSourceError
from kvoy_engine.model_store import default_name, resolve

POLL_S = 0.1
ANSWER_TOKENS = 64
KEPT_LOG_FOLDERS = 10
MIN_KV_BYTES = 64 << 20
MAX_KV_BYTES = 2 << 30
MIN_FREE_DISK_BYTES = 32 << 20


class Stopped(Exception):
    """SIGINT or SIGTERM asked this command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True, slots=True)
class Stack:
    """What is started, once everything is known."""

    config: UpConfig
    model: Path | str
    """The model's folder; with the timing runner only a name."""
    served_name: str
    log_folder: Path
    environment: dict[str, str]

    @property
    def base_url(self) -> str:
        return f"http://{self.config.reachable_host}:{self.config.port}/v1"


def main(argv: Sequence[str]) -> int:
    config = read_settings(
        UpConfig,
        "kvoy up",
        "Start a router and engines on this machine, ask one question, and serve until Ctrl-C.",
        argv,
    )
    report = Reporter()
    with _signals_stop():
        is_serving = False
        try:
            check_installed(config)
            check_ports(config.reachable_host, config.port_uses())
            stack = prepare(config, report)
            with Children(stack.log_folder) as children:
                try:
                    start(stack, children, report)
                    if config.ask:
                        ask(stack, children, report)
                    report.print("Serving until Ctrl-C.")
                    is_serving = True
                    while True:
                        children.check()
                        time.sleep(POLL_S)
                finally:
                    report.print("Stopping every process.")
        except ModelSourceError as error:
            raise CommandError(str(error)) from error
        except Stopped as stop:
            return 0 if is_serving else 128 + stop.number
        except OSError as error:
            raise CommandError(f"{error.strerror or error}: {error.filename or home()}") from error


def check_installed(config: UpConfig) -> None:
    """Raise CommandError, naming the extra, when a child could not even import what it needs."""
    extra = "sim" if config.is_sim else "engine"
    modules = {"fastapi": "router", "httptools": "router", "grpc_health": extra}
    if not config.is_sim:
        modules |= {"torch": extra, "safetensors": extra}
    missing = {name: extra for name, extra in modules.items() if not importlib.util.find_spec(name)}
    if missing:
        extras = ",".join(sorted(set(missing.values()) | {"cli"}))
        names = ", ".join(missing)
        raise CommandError(f"not installed: {names}; pip install 'kvoy[{extras}]'")


def prepare(config: UpConfig, report: Reporter) -> Stack:
    """Everything before the first process: model, secret, log folder. Raises ModelSourceError."""
    name = config.served_model_name or default_name(config.model_ref)
    model: Path | str = config.model_ref
    if not config.is_sim:
        with report.tasks() as new_task:
            task = new_task(f"looking for {config.model_ref}")
            model = resolve(config.model_ref, task.say, task.fraction)
            task.done(f"model {name} in {model}")
        if config.kv_cache_memory_bytes is None:
            config = replace(config, kv_cache_memory_bytes=str(default_kv_bytes(config.engines)))
    secret = config.secret or secrets.token_urlsafe(32)
    environment = config.child_environment(secret, os.environ)
    return Stack(config, model, name, new_log_folder(home() / "logs"), environment)


def default_kv_bytes(num_engines: int) -> int:
    """Half of the free memory for the engines' KV caches together, within limits for each."""
    share = psutil.virtual_memory().available // 2 // num_engines
    return max(MIN_KV_BYTES, min(MAX_KV_BYTES, share))


def new_log_folder(root: Path) -> Path:
    """A new folder for this start's logs; old ones beyond a few are removed.

    Raises CommandError when the disk is full.
    """
    root.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(root).free < MIN_FREE_DISK_BYTES:
        raise CommandError(f"no disk space is left under {root}")
    folder = root / f"up-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir()
    for old in sorted(root.glob("up-*"))[:-KEPT_LOG_FOLDERS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def start(stack: Stack, children: Children, report: Reporter) -> None:
    """Start every child and return once the router can route to every engine.

    Raises CommandError when one dies or the time is over.
    """
    config = stack.config
    threads = max(1, usable_cores() // config.engines)
    report.print(f"logs in {stack.log_folder}", style="dim")
    with report.tasks() as new_task:
        waits = []
        for port in config.engine_ports:
            command = config.engine_command(port, stack.model, stack.served_name, threads)
            child = children.start(f"engine {port}", command, stack.environment)
            waits.append(_Wait(child, "127.0.0.1", port, new_task(f"{child.name} is starting")))
        child = children.start("router", config.router_command(), stack.environment)
        waits.append(
            _Wait(child, config.reachable_host, config.port, new_task("the router is starting"))
        )
        _wait_until_ready(waits, children, time.monotonic() + config.ready_timeout_s)


@dataclass(frozen=True, slots=True)
class _Wait:
    """A child that is not ready yet."""

    child: Child
    host: str
    port: int
    task: Task

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=2.0)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def show_progress(self) -> None:
        """What an engine says that it is loading, if that is the last thing it said."""
        for line in self.child.last_lines(1):
            _, is_loading, what = line.partition("loading: ")
            if is_loading:
                self.task.note(what)


def _wait_until_ready(waits: list[_Wait], children: Children, deadline_s: float) -> None:
    started = time.monotonic()
    while waits:
        children.check()
        for wait in list(waits):
            if wait.is_ready():
                elapsed = time.monotonic() - started
                wait.task.done(f"{wait.child.name} is ready after {elapsed:.1f} s")
                waits.remove(wait)
            else:
                wait.show_progress()
        if waits and time.monotonic() > deadline_s:
            names = ", ".join(wait.child.name for wait in waits)
            raise CommandError(f"not ready in time: {names}; see {waits[0].child.log}")
        time.sleep(POLL_S)


def ask(stack: Stack, children: Children, report: Reporter) -> None:
    """Print the endpoint, a curl line, and a real answer as it streams. Raises CommandError."""
    name, question = stack.served_name, stack.config.question
    report.print()
    report.print(f"OpenAI endpoint: {stack.base_url}   model: {name}", style="bold")
    report.print(
        f"  curl -N {stack.base_url}/chat/completions -H 'content-type: application/json' "
        f"""-d '{{"model": "{name}", "max_tokens": {ANSWER_TOKENS}, "stream": true, """
        f""""messages": [{{"role": "user", "content": "Hello!"}}]}}'"""
    )
    report.print(f"  kvoy chat --url {stack.base_url}")
    report.print()
    report.print(f"> {question}", style="bold")
    answer = Answer()
    messages = [{"role": "user", "content": question}]
    options = {"max_completion_tokens": ANSWER_TOKENS, "temperature": 0.0}
    try:
        for text in Endpoint(stack.base_url).stream_chat(answer, name, messages, **options):
            report.stream(text)
    except CommandError:
        children.check()
        raise
    report.print()
    report.print(f"  {answer.summary()}", style="dim")
    if not answer.text:
        raise CommandError(f"the stack answered without any text; see {stack.log_folder}")
    report.print()


@contextlib.contextmanager
def _signals_stop() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped inside this context."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
