"""A platform as a user has it: a cluster with nodes and containers, images loaded, one client."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoy_cluster.build import Binaries
from kvoy_cluster.cluster import Cluster
from kvoy_cluster.waiting import wait_for

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts/kvoy"
SYSTEM = "kvoy-system"
NAMESPACE = "demo"
CLIENT = "client"
READY_S = 240.0
FULL_NODE, BARE_NODE = "n1", "n2"
"""The second has no image of the native engine, which is 4 GB with the torch that PyPI has."""
MODEL = "smollm2-135m-instruct"
MODELS = Path(os.environ.get("KVOY_HOME", Path.home() / ".cache/kvoy")) / "models"

# The claim `models`, which leads to this machine's own folder of models.
VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {{name: models}}
spec:
  capacity: {{storage: 10Gi}}
  accessModes: [ReadWriteMany]
  storageClassName: ""
  hostPath: {{path: "{path}"}}
  claimRef: {{namespace: demo, name: models}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: models}}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  volumeName: models
  resources: {{requests: {{storage: 10Gi}}}}
"""

CLIENT_POD = """
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
  containers:
  - name: client
    image: localhost/kvoy/test-client:{version}
    args: [/client/client.py, wait]
    volumeMounts: [{name: client, mountPath: /client}]
  volumes: [{name: client, configMap: {name: client}}]
"""


class Load:
    """Streams from the client's pod until `finish`."""

    def __init__(self, platform: Platform, url: str, model: str, concurrency: int) -> None:
        self._platform = platform
        self._stop_file = f"/tmp/stop-{uuid.uuid4().hex}"
        arguments = ["load", url, model, str(concurrency), self._stop_file]
        self._process = subprocess.Popen(
            platform.client_command(*arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> dict[str, Any]:
        """Stop, and say what became of the streams: completed, chunks, failures."""
        self._platform.kubectl("exec", "-n", NAMESPACE, CLIENT, "--", "touch", self._stop_file)
        output, errors = self._process.communicate(timeout=READY_S)
        assert self._process.returncode == 0, errors
        report: dict[str, Any] = json.loads(output)
        return report


@dataclass(slots=True)
class Platform:
    cluster: Cluster
    binaries: Binaries
    namespace: str = NAMESPACE

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self.cluster.kubectl(*arguments, input=input)

    def apply(self, text: str) -> None:
        self.kubectl("apply", "-n", self.namespace, "-f", "-", input=text)

    def helm(self, *arguments: str) -> str:
        done = subprocess.run(
            [
                str(self.binaries.program("helm")),
                "--kubeconfig",
                str(self.cluster.kubeconfig),
                *arguments,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *settings: str) -> None:
        """Kvoy by its chart, as a user does; returns when its operators are ready."""
        self.helm(
            *("install", "kvoy", str(CHART), "--namespace", SYSTEM, "--create-namespace"),
            *("--wait", "--timeout", "3m", *settings),
        )

    def uninstall(self) -> None:
        self.helm("uninstall", "kvoy", "--namespace", SYSTEM, "--wait")

    def get(self, kind: str, name: str, namespace: str = "") -> dict[str, Any]:
        body: dict[str, Any] = json.loads(
            self.kubectl("get", kind, name, "-n", namespace or self.namespace, "-o", "json")
        )
        return body

    def all_of(self, kind: str, selector: str) -> list[dict[str, Any]]:
        text = self.kubectl("get", kind, "-n", self.namespace, "-l", selector, "-o", "json")
        items: list[dict[str, Any]] = json.loads(text)["items"]
        return items

    def condition(self, name: str, condition: str, kind: str = "llm") -> dict[str, Any]:
        """The condition of a service or router; empty while it has none."""
        conditions = self.get(kind, name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == condition), {})

    def wait_until_settled(self, name: str, kind: str = "llm", limit_s: float = READY_S) -> None:
        """Ready, nothing in progress, and the status is about the spec as it is now."""

        def is_settled() -> bool:
            body = self.get(kind, name)
            status = body.get("status", {})
            conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
            return (
                status.get("observedGeneration") == body["metadata"]["generation"]
                and conditions.get("Ready") == "True"
                and conditions.get("Progressing") != "True"
            )

        try:
            wait_for(is_settled, f"{kind}/{name} is settled", limit_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.describe(name, kind)}") from None

    def describe(self, name: str, kind: str = "llm") -> str:
        """What a person would look at."""
        return "\n".join(
            (
                self.kubectl("describe", kind, name, "-n", self.namespace),
                self.kubectl("get", "pods", "-n", self.namespace, "-o", "wide"),
                self.operator_log()[-4000:],
            )
        )

    def operator_log(self) -> str:
        return self.kubectl(
            *("logs", "-n", SYSTEM, "-l", "app.kubernetes.io/name=kvoy", "--tail=-1"),
            "--max-log-requests=10",
        )

    def client_command(self, *arguments: str) -> list[str]:
        return [
            *(str(self.binaries.program("kubectl")), "--kubeconfig", str(self.cluster.kubeconfig)),
            *("exec", "-n", NAMESPACE, CLIENT, "--"),
            *("/opt/client/bin/python", "/client/client.py", *arguments),
        ]

    def chat(self, url: str, model: str, *turns: str) -> dict[str, Any]:
        """A conversation by the official client in a pod: models, and an answer per turn."""
        done = subprocess.run(
            self.client_command("chat", url, model, *turns),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def load(self, url: str, model: str, concurrency: int = 2) -> Load:
        return Load(self, url, model, concurrency)


def archives() -> dict[str, Path]:
    """The product's images and the client's, built where they are missing, by their names."""
    client = "test-client=tests/e2e/client.Dockerfile"
    names = ["engine-cpu", "engine-sim", "operator", "router", client]
    done = subprocess.run(
        ["tools/images.sh", "archives", *names],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, "the images cannot be built, see above"
    return dict(zip(names, map(Path, done.stdout.split()), strict=True))
