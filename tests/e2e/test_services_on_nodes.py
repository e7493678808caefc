"""What takes nodes and containers, beside the story: a model fetched once for all engines, a
canary that gets its share of an endpoint in the cluster, and an endpoint with keys and TLS."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

from kvoy_cluster.build import build
from kvoy_cluster.cluster import Cluster
from kvoy_cluster.pki import Authority
from kvoy_cluster.waiting import wait_for
from kvoy_contract.names import ENGINE_HEADER
from kvoy_e2e.platform import FULL_NODE, READY_S, Platform
from kvoy_engine.testing import write_tiny_model
from kvoy_router.keys import new_key

pytestmark = pytest.mark.slow

_NAMESPACE = "nodes"
_TOKEN = "hf_sesame"
_WEIGHTS = "model.safetensors"

HUB = """
apiVersion: v1
kind: Pod
metadata: {{name: hub, labels: {{app: hub}}}}
spec:
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
  containers:
  - name: hub
    image: localhost/kvoy/engine:{version}-sim
    command: [/opt/kvoy/bin/python, /hub/hub.py, org/tiny, /model, {token}]
    readinessProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1}}
    volumeMounts: [{{name: hub, mountPath: /hub}}, {{name: model, mountPath: /model}}]
  volumes:
  - {{name: hub, configMap: {{name: hub}}}}
  - {{name: model, hostPath: {{path: "{model}"}}}}
---
apiVersion: v1
kind: Service
metadata: {{name: hub}}
spec:
  selector: {{app: hub}}
  ports: [{{port: 80, targetPort: 8080}}]
"""

# One folder of this machine, which is every node's.
VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {{name: cache}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteMany]
  storageClassName: ""
  hostPath: {{path: "{path}"}}
  claimRef: {{namespace: nodes, name: cache}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: cache}}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  volumeName: cache
  resources: {{requests: {{storage: 1Gi}}}}
"""

FETCHED = """
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata: {{name: {name}}}
spec:
  model:
    uri: hf://org/{name}
    tokenSecretRef: {{name: hub, key: token}}
    cache: {{pvc: {{claimName: cache}}}}
  engine:
    env: [{{name: HF_ENDPOINT, value: "http://hub"}}]
    podTemplate: {{spec: {{nodeSelector: {{kubernetes.io/hostname: {node}}}}}}}
  replicas: 2
  resources: {{requests: {{cpu: 100m}}}}
  router: {{replicas: 1}}
"""

CANARY = """
apiVersion: kvoy.dev/v1alpha1
kind: LLMRouter
metadata: {name: shared}
spec:
  replicas: 2
  weights: [{service: stable, weight: 90}, {service: canary, weight: 10}]
---
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata: {name: stable}
spec: {model: {uri: hf://org/stable, name: chat}, engine: {kind: sim}, router: {ref: shared}}
---
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata: {name: canary}
spec: {model: {uri: hf://org/canary, name: chat}, engine: {kind: sim}, router: {ref: shared}}
"""

GUARDED = """
apiVersion: kvoy.dev/v1alpha1
kind: LLMService
metadata: {name: guarded}
spec:
  model: {uri: hf://org/guarded}
  engine: {kind: sim}
  router:
    replicas: 1
    apiKeysSecretRef: {name: guarded-keys}
    tlsSecretRef: {name: guarded-certificate}
"""

NUM = 200


@pytest.fixture(scope="module")
def nodes(cluster: Cluster, images: dict[str, Path]) -> Iterator[Platform]:
    """Kvoy is installed. One service waits for its Secrets all along: it takes a while until that
    is told."""
    platform = Platform(cluster, build(), _NAMESPACE)
    platform.kubectl("create", "namespace", _NAMESPACE)
    platform.install()
    platform.apply(GUARDED)
    yield platform
    platform.kubectl("delete", "namespace", _NAMESPACE, "--wait=false")
    platform.uninstall()


@pytest.fixture(scope="module")
def hub(nodes: Platform, tmp_path_factory: pytest.TempPathFactory) -> Platform:
    """The hub serves one tiny model, and a claim waits for it; nobody has the token yet."""
    folder = tmp_path_factory.mktemp("hub")
    model = write_tiny_model(folder / "model")
    for file in model.iterdir():
        file.chmod(0o644)
    # Containers are not root.
    cache = folder / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    script = Path(__file__).parent / "hub.py"
    nodes.kubectl("create", "configmap", "hub", "-n", _NAMESPACE, f"--from-file={script}")
    nodes.apply(HUB.format(version=version("kvoy"), token=_TOKEN, model=model))
    nodes.apply(VOLUME.format(path=cache))
    nodes.kubectl(*("wait", "-n", _NAMESPACE, "--for=condition=Ready", "--timeout=240s", "pod/hub"))
    return nodes


def _requests(hub: Platform) -> list[tuple[str, str, str | None]]:
    """What was asked of the hub: method, path, range."""
    log = hub.kubectl("logs", "-n", _NAMESPACE, "hub", "--tail=-1")
    return [tuple(json.loads(line)) for line in log.splitlines()]


def _wait_for_reason(nodes: Platform, name: str, condition: str, reason: str) -> str:
    """The condition's message, once it has that reason."""
    found = wait_for(
        lambda: (
            found if (found := nodes.condition(name, condition)).get("reason") == reason else None
        ),
        f"{name}: {condition} for {reason}",
        120,
    )
    message: str = found["message"]
    return message


def _base(nodes: Platform, service: str) -> str:
    """The Service of that name, through this machine's loopback."""
    return f"http://127.0.0.1:{nodes.cluster.forward_service(_NAMESPACE, service, 80)}"


def _ask(base: str, model: str, *turns: str) -> str:
    """The engine that answered the last turn."""
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(turns)
    ]
    body = {"model": model, "messages": messages, "max_tokens": 2}
    request = urllib.request.Request(
        f"{base}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] > 0
        return str(answer.headers[ENGINE_HEADER])


class _Conversations:
    """Many, each with a beginning of its own, that are asked again and again."""

    def __init__(self, base: str) -> None:
        self._base = base
        self.failures: list[str] = []

    def services(self, *more_turns: str) -> list[str]:
        """Which service answers each of them. Raises OSError if one is not answered."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda number: self._ask(number, *more_turns), range(NUM)))

    def _ask(self, number: int, *more_turns: str) -> str:
        try:
            engine = _ask(self._base, "chat", f"Conversation {number} begins", *more_turns)
        except OSError as error:
            self.failures.append(repr(error))
            raise
        return engine.partition("-")[0]


def _weigh(nodes: Platform, stable: int, canary: int) -> None:
    weights = [{"service": "stable", "weight": stable}, {"service": "canary", "weight": canary}]
    patch = json.dumps({"spec": {"weights": weights}})
    nodes.kubectl("patch", "-n", _NAMESPACE, "llmrouter/shared", "--type=merge", "-p", patch)


def _agreed(conversations: _Conversations) -> list[str] | None:
    """Half of them are the canary's, whichever router is asked."""
    now = conversations.services()
    return now if now.count("canary") > 50 and now == conversations.services() else None


def _kept(conversations: _Conversations) -> list[str] | None:
    """Where first and later turns go, once both routers know all engines."""
    first = conversations.services()
    return first if first == conversations.services("and", "goes on") else None


def test_a_canary_gets_its_share_of_the_conversations_and_keeps_them(nodes: Platform) -> None:
    nodes.apply(CANARY)
    for name in ("stable", "canary"):
        nodes.wait_until_settled(name)
    nodes.wait_until_settled("shared", kind="llmrouter")
    conversations = _Conversations(_base(nodes, "shared"))

    first = wait_for(
        lambda: _kept(conversations), "later turns go where the first ones went", READY_S
    )
    # Of 200 at 10 %: within 2.4 standard deviations, and always the same.
    assert 10 <= first.count("canary") <= 30

    _weigh(nodes, 50, 50)
    even = wait_for(
        lambda: _agreed(conversations), "the new weights are in force at both routers", READY_S
    )
    assert 75 <= even.count("canary") <= 125
    assert all(now == "canary" for was, now in zip(first, even, strict=True) if was == "canary")

    nodes.kubectl("scale", "-n", _NAMESPACE, "llm/canary", "--replicas=0")
    wait_for(lambda: "canary" not in conversations.services(), "stable has it all", READY_S)
    nodes.kubectl("scale", "-n", _NAMESPACE, "llm/canary", "--replicas=1")
    wait_for(
        lambda: conversations.services() == even, "the canary has its conversations again", READY_S
    )
    assert conversations.failures == []


def test_one_job_fetches_a_model_for_all_engines(hub: Platform) -> None:
    hub.apply(FETCHED.format(name="tiny", node=FULL_NODE))
    told = _wait_for_reason(hub, "tiny", "Degraded", "MissingSecret")
    assert 'secret "hub" not found' in told

    hub.kubectl(
        "create", "secret", "generic", "hub", "-n", _NAMESPACE, f"--from-literal=token={_TOKEN}"
    )

    hub.wait_until_settled("tiny")
    engines = hub.all_of("pods", "kvoy.dev/service=tiny,kvoy.dev/component=engine")
    assert len(engines) == 2
    (job,) = hub.all_of("jobs", "kvoy.dev/service=tiny")
    assert job["status"]["succeeded"] == 1
    assert not job["status"].get("failed")
    asked = _requests(hub)
    transfers = [path for method, path, _ in asked if method == "GET" and path.endswith(_WEIGHTS)]
    assert len(transfers) == 1
    assert _ask(_base(hub, "tiny"), "tiny", "Hello") in {pod["metadata"]["name"] for pod in engines}
    # Engines read the volume and ask no hub.
    assert _requests(hub) == asked


def test_a_model_that_the_hub_lacks_is_named_in_the_condition(hub: Platform) -> None:
    hub.apply(FETCHED.format(name="absent", node=FULL_NODE))

    told = _wait_for_reason(hub, "absent", "Degraded", "ModelFetchFailed")
    assert "org/absent" in told
    assert hub.condition("absent", "Ready")["status"] == "False"
    assert hub.condition("absent", "Progressing")["reason"] == "WaitingForModel"


class _Guarded:
    """The endpoint that asks for keys, from outside of the cluster."""

    def __init__(self, nodes: Platform) -> None:
        self._nodes = nodes
        self._entries: list[dict[str, str]] = []
        self._authority = Authority("team")
        self._base = ""

    def add_certificate(self) -> None:
        pair = self._authority.sign("endpoint", hosts=["guarded.nodes.svc", "127.0.0.1"])
        data = {"tls.crt": pair.certificate_pem.decode(), "tls.key": pair.key_pem.decode()}
        self._add_secret("guarded-certificate", "kubernetes.io/tls", data)

    def add_key(self) -> str:
        key, key_id, digest = new_key()
        self._entries.append({"id": key_id, "hash": digest, "tenant": "team"})
        data = {"keys.yaml": json.dumps({"keys": self._entries})}
        self._add_secret("guarded-keys", "Opaque", data)
        return key

    def _add_secret(self, name: str, kind: str, data: dict[str, str]) -> None:
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        self._nodes.apply(json.dumps({**body, "type": kind, "stringData": data}))

    def routers(self) -> dict[str, str]:
        """uids of its pods, by name."""
        selector = "kvoy.dev/service=guarded,kvoy.dev/component=router"
        pods = self._nodes.all_of("pods", selector)
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    def ask(self, key: str = "", max_tokens: int = 2) -> int:
        """The HTTP status."""
        if not self._base:
            port = self._nodes.cluster.forward_service(_NAMESPACE, "guarded", 443)
            self._base = f"https://127.0.0.1:{port}"
        body = {"model": "guarded", "prompt": "Hello", "max_tokens": max_tokens}
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{self._base}/v1/completions", json.dumps(body).encode(), headers
        )
        trusted = ssl.create_default_context(cadata=self._authority.pair.certificate_pem.decode())
        try:
            with urllib.request.urlopen(request, timeout=60, context=trusted) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


def test_an_endpoint_asks_for_keys_and_takes_new_ones_and_limits_without_a_new_pod(
    nodes: Platform,
) -> None:
    told = _wait_for_reason(nodes, "guarded", "RouterReady", "MissingSecret")
    assert 'secret "guarded-' in told
    guarded = _Guarded(nodes)
    guarded.add_certificate()
    first = guarded.add_key()
    # One that has waited for long looks only every two minutes.
    nodes.kubectl("delete", "pod", "-n", _NAMESPACE, *guarded.routers(), "--wait=false")
    nodes.wait_until_settled("guarded")
    assert nodes.get("llm", "guarded")["status"]["url"] == "https://guarded.nodes.svc/v1"
    routers = guarded.routers()

    assert (guarded.ask(), guarded.ask(first)) == (401, 200)

    second = guarded.add_key()
    wait_for(lambda: guarded.ask(second) == 200, "the new key is taken", 180)
    assert (guarded.ask(), guarded.ask(first)) == (401, 200)

    limits = json.dumps({"spec": {"router": {"timeouts": {"request": "1s"}}}})
    nodes.kubectl("patch", "-n", _NAMESPACE, "llm/guarded", "--type=merge", "-p", limits)
    nodes.wait_until_settled("guarded")
    wait_for(lambda: guarded.ask(first, 2000) == 504, "the new limit holds", 180)
    assert guarded.routers() == routers
