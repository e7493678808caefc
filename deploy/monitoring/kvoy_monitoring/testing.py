"""For tests: two engines with the timing runner, a router and a Prometheus, on loopback.

Targets get the labels that the chart's monitors give them.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvoy_contract.names import ENGINE_HEADER
from kvoy_contract.testing_ports import free_port
from kvoy_monitoring.panel import Dashboard

LIMIT_S = 90.0
SCRAPE_S = 1
_PAUSE_S = 0.1
"""Of a user whom nobody served, as the official clients make one."""
NUM_SEATS = 4
"""Of each engine: both have fewer than the traffic has users."""
SECRET = "monitoring-test-secret"
MODEL = "demo"
_SIM = ("--sim-base-s", "0.004", "--sim-prefill-tokens-per-s", "60000")


_VARIABLES = {"$__rate_interval": "15s", "$namespace": ".*", "$service": ".*", "$pod": ".*"}


def as_grafana_asks(expr: str) -> str:
    """The expression with every variable on All, over a window of some scrapes."""
    for name, value in _VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def query(client: httpx.Client, address: str, expr: str) -> list[dict[str, Any]]:
    """The instant vector of an expression. AssertionError when Prometheus refuses it."""
    answer = client.get(f"{address}/api/v1/query", params={"query": expr}).json()
    assert answer["status"] == "success", f"{expr}: {answer}"
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def panels_without_data(
    ask: Callable[[str], list[dict[str, Any]]],
    dashboards: Iterable[Dashboard],
    is_wanted: Callable[[str], bool],
) -> list[str]:
    """Each expression, of those wanted, that yields nothing or only NaN, after its panel."""
    missing = []
    for dashboard in dashboards:
        for panel in dashboard.panels:
            for expr in (as_grafana_asks(q.expr) for q in panel.queries if is_wanted(q.expr)):
                values = [float(sample["value"][1]) for sample in ask(expr)]
                if not values or all(map(math.isnan, values)):
                    missing.append(f"{dashboard.title} / {panel.title}: {expr}")
    return missing


def wait_for(check: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Poll until `check()` is true; AssertionError with its last exception after the limit."""
    deadline = time.monotonic() + limit_s
    last: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if check():
                return
        except (httpx.HTTPError, KeyError, IndexError) as error:
            last = error
        time.sleep(0.1)
    raise AssertionError(f"timed out: {what} ({last})")


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to scrape, `127.0.0.1:port`, with a pod's labels."""

    port: int
    labels: Mapping[str, str]


@dataclass(slots=True)
class Observed:
    """The running stack and its Prometheus."""

    prometheus: str
    """Base address."""
    router: str
    engines: list[subprocess.Popen[bytes]]
    ports: list[int]
    """Of the engines, in their order."""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30.0))

    def query(self, expr: str) -> list[dict[str, Any]]:
        return query(self.client, self.prometheus, expr)

    def alerts(self) -> set[str]:
        """Names of the alerts that fire now."""
        answer = self.client.get(f"{self.prometheus}/api/v1/alerts").json()
        return {
            alert["labels"]["alertname"]
            for alert in answer["data"]["alerts"]
            if alert["state"] == "firing"
        }

    def ask(self, prompt: str, *, stream: bool = False, max_tokens: int = 8, **more: Any) -> int:
        """One completion through the router; the answer's status."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
        return self.client.post(f"{self.router}/v1/completions", json=body | more).status_code

    @contextlib.contextmanager
    def begun_stream(self) -> Iterator[subprocess.Popen[bytes]]:
        """The engine of a stream that has begun and goes on for seconds: its prompt and answer
        fill half of the engine's blocks."""
        body = {"model": MODEL, "prompt": "Go on", "max_tokens": 1000, "stream": True}
        with self.client.stream("POST", f"{self.router}/v1/completions", json=body) as answer:
            events = answer.iter_lines()
            assert next(events).startswith("data: "), "the stream has begun"
            address = answer.headers[ENGINE_HEADER]
            yield self.engines[self.ports.index(int(address.rpartition(":")[2]))]


@contextlib.contextmanager
def processes() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A starter of child processes, which all end, by their process id, with the block."""
    running: list[subprocess.Popen[bytes]] = []

    def start(argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVOY_")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        running.append(process)
        return process

    try:
        yield start
    finally:
        for process in reversed(running):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(LIMIT_S)


def write_configuration(folder: Path, targets: Sequence[Target], rules: Mapping[str, Any]) -> Path:
    """A prometheus.yml that scrapes the targets every second and evaluates the rules as often."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(dict(rules)))
    path = folder / "prometheus.yml"
    path.write_text(
        yaml.safe_dump(
            {
                "global": {
                    "scrape_interval": f"{SCRAPE_S}s",
                    "scrape_timeout": f"{SCRAPE_S}s",
                    "evaluation_interval": f"{SCRAPE_S}s",
                },
                "rule_files": ["rules.yaml"],
                "scrape_configs": [
                    {
                        "job_name": "kvoy",
                        "honor_labels": True,
                        "static_configs": [
                            {
                                "targets": [f"127.0.0.1:{target.port}"],
                                "labels": dict(target.labels),
                            }
                            for target in targets
                        ],
                    }
                ],
            }
        )
    )
    return path


def hastened(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The same rules with every alert due after a second, over windows of some seconds."""
    text = yaml.safe_dump(dict(groups))
    for window in ("5m", "15m", "30m"):
        text = text.replace(f"[{window}]", "[15s]")
    hastened_groups: dict[str, Any] = yaml.safe_load(text)
    for group in hastened_groups["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["for"] = "1s"
    return hastened_groups


@contextlib.contextmanager
def prometheus(folder: Path, targets: Sequence[Target], rules: Mapping[str, Any]) -> Iterator[str]:
    """A Prometheus of its own on a free port; its base address."""
    port = free_port()
    configuration = write_configuration(folder, targets, rules)
    with processes() as start:
        start(
            [
                "prometheus",
                f"--config.file={configuration}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            folder / "prometheus.log",
        )
        address = f"http://127.0.0.1:{port}"
        wait_for(
            lambda: httpx.get(f"{address}/-/ready").status_code == 200, "prometheus is not ready"
        )
        yield address


@contextlib.contextmanager
def observe_stack(folder: Path) -> Iterator[Observed]:
    """Two small engines, one router, Prometheus, and traffic of every kind all the while."""
    from kvoy_monitoring.__main__ import rule_groups

    base = free_port((0, 1, 2, 3, 1000, 1001))
    ports = [base, base + 1]
    router_port, admin_port = base + 2, base + 3
    kvoy = [sys.executable, "-m", "kvoy_cli"]
    with processes() as start:
        engines = [
            start(
                [
                    *(*kvoy, "serve", "--runner", "sim", "--port", str(port), "--secret", SECRET),
                    *("--served-model-name", MODEL, "--num-gpu-blocks-override", "160", *_SIM),
                    *("--max-num-seqs", str(NUM_SEATS)),
                ],
                folder / f"engine-{port}.log",
            )
            for port in ports
        ]
        start(
            [
                *(*kvoy, "router", "--port", str(router_port), "--admin-port", str(admin_port)),
                *("--secret", SECRET, "--stale-after-s", "2"),
                # The traffic's answers take about a second: who finds no seat waits at the router.
                *("--max-engine-wait-s", "0.1"),
                *(f"--engine=127.0.0.1:{port}" for port in ports),
            ],
            folder / "router.log",
        )
        common = {"namespace": "default", "llmservice": MODEL}
        targets = [
            *(
                Target(port, {**common, "pod": f"engine-{port}", "pool": "serving"})
                for port in ports
            ),
            Target(admin_port, {**common, "pod": "router-0"}),
        ]
        with prometheus(folder, targets, hastened(rule_groups())) as address:
            stack = Observed(address, f"http://127.0.0.1:{router_port}", engines, ports)
            wait_for(lambda: stack.ask("Hello") == 200, "the stack answers")
            with traffic(stack):
                yield stack
            stack.client.close()


@contextlib.contextmanager
def traffic(stack: Observed, num_users: int = 16) -> Iterator[None]:
    """Streams and plain answers over shared prefixes, refusals, and more at once than memory
    holds, for as long as the block runs."""
    stop = threading.Event()

    def use(number: int) -> None:
        turn = number  # else all of an engine's requests are streams, or none is
        while not stop.is_set():
            turn += 1
            prompt = f"conversation {number} " + "and so on, " * (20 + turn % 40)
            with contextlib.suppress(httpx.HTTPError):
                if stack.ask(prompt, stream=bool(turn % 4), max_tokens=200) != httpx.codes.OK:
                    stop.wait(_PAUSE_S)
                if turn % 5 == 0:
                    stack.ask(prompt, max_tokens=-1)

    users = [threading.Thread(target=use, args=(number,)) for number in range(num_users)]
    for thread in users:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in users:
            thread.join(LIMIT_S)
