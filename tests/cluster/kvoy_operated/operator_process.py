"""`kvoy operator` as a child process: its log, its metrics, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvoy_cluster.waiting import wait_for
from kvoy_contract.testing_ports import free_port

_TIMEOUT_S = 240.0
"""Of whatever takes seconds on an idle machine."""
_ANSWER_TIMEOUT_S = 60.0
_OWN_PACKAGES = str(Path(__file__).parents[1])


class OperatorProcess:
    def __init__(
        self, kubeconfig: Path, log: Path, arguments: Sequence[str], module: str = "kvoy_cli"
    ) -> None:
        """`log` is appended to, so that several operators may share one; `module` is what runs."""
        self.port = free_port()
        self.log = log
        command = [sys.executable, "-m", module, "operator", "--host=127.0.0.1"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, f"--port={self.port}", f"--kubeconfig={kubeconfig}", *arguments],
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": _OWN_PACKAGES},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        wait_for(
            lambda: self.get("/readyz") == "ok\n",
            "operator ready",
            _TIMEOUT_S,
            unless=self._ended,
        )

    def wait_until_leading(self) -> None:
        wait_for(
            lambda: self.metric("kvoy_operator_leader") == 1.0,
            "operator leads",
            _TIMEOUT_S,
            unless=self._ended,
        )

    def get(self, path: str) -> str:
        address = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(address, timeout=_ANSWER_TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        return sum_of(self.get("/metrics"), name, **labels)

    def writes(self) -> float:
        """Calls so far that may change something, those to the Lease apart."""
        name = "kvoy_operator_api_writes_total"
        return self.metric(name) - self.metric(name, resource="leases")

    def lines(self, *parts: str) -> list[str]:
        """Log lines with all of these parts."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if all(part in line for part in parts)]

    def terminate(self) -> int:
        """End it as Kubernetes does; its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_TIMEOUT_S)

    def kill(self) -> None:
        """End it as a lost node does."""
        self._process.kill()
        self._process.wait(_TIMEOUT_S)

    def stop(self) -> None:
        if self.is_running:
            self.kill()

    def _ended(self) -> str | None:
        if self.is_running:
            return None
        return f"ended: {self.log.read_text()[-2000:]}"


def sum_of(metrics: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels, in the text of a scrape."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
