"""A service's whole life, with operators that end in the middle of it: the log has one line for
each transition that the API server has seen, and nothing twice."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_operated import Site
from kvoy_operator.kinds import EVENT, LLM_SERVICE
from kvoy_operator.transitions import transitions
from kvoy_operator_bench.client import Body, connect

pytestmark = pytest.mark.slow

_AS_JSON = "--log-format=json"
_NUM_ENDED = 2
"""Operators that end within the life."""


class _History:
    """Every state of the conditions of a namespace's services, from a watch in a thread."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._kubeconfig = kubeconfig
        self._path = LLM_SERVICE.path(namespace)
        self.conditions: list[list[dict[str, Any]]] = [[]]
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="history")
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def told(self) -> Counter[tuple[str, str]]:
        """Reason and message of each transition, and how often it was gone through."""
        return Counter(
            (turned.reason, turned.message)
            for before, after in itertools.pairwise(self.conditions)
            for turned in transitions(before, after)
        )

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._follow())

    async def _follow(self) -> None:
        async with connect(self._kubeconfig) as client:
            watch = asyncio.create_task(client.watch(self._path, "", self._see))
            await self._end.wait()
            watch.cancel()

    def _see(self, event_type: str, body: Body) -> None:
        found = (body.get("status") or {}).get("conditions") or []
        if event_type != "DELETED" and found != self.conditions[-1]:
            self.conditions.append(found)


@pytest.fixture
def site(api_server: ApiServer, kvoy_crds: None, tmp_path: Path) -> Iterator[Site]:
    site = Site(api_server, tmp_path)
    yield site
    site.close()


@pytest.fixture
def history(site: Site) -> Iterator[_History]:
    history = _History(site.server.kubeconfig, site.namespace)
    yield history
    history.close()


def test_a_life_is_told_once_whatever_operators_come_and_go(site: Site, history: _History) -> None:
    first = site.start_operator(_AS_JSON)
    first.wait_until_leading()
    site.start_kubelet()
    split: dict[str, Any] = {"engine": {"kind": "sim"}, "prefill": {"replicas": 1}}
    site.apply("qwen", **split)
    site.wait_for_condition("qwen", "Ready", "True", "AllReady")

    # Another operator looks at everything anew.
    first.terminate()
    second = site.start_operator(_AS_JSON)
    second.wait_until_leading()
    site.wait_until(lambda: _num_reconciles(second) >= 1, "the second one has looked")

    changed = {**split, "engine": {"kind": "sim", "args": ["--max-num-seqs=64"]}}
    site.apply("qwen", **changed)
    site.wait_until(lambda: _is_on_its_way(site), "a rollout begins")
    second.terminate()
    third = site.start_operator(_AS_JSON)
    _wait_until_settled(site)

    site.apply("qwen", **changed, replicas=3)
    _wait_until_settled(site)
    site.wait_for_condition("qwen", "Ready", "True", "AllReady")
    status = site.get("LLMService", "qwen")["status"]
    site.wait_until(lambda: history.conditions[-1] == status["conditions"], "all states are seen")
    seen = history.told()
    events = _events(site)
    site.delete("LLMService", "qwen")
    site.wait_until_gone("LLMService", "qwen")
    site.wait_until(lambda: not site.all("Deployment"), "its children gone")
    third.terminate()

    entries = [json.loads(line) for line in site.log.read_text().splitlines()]
    lines = [entry for entry in entries if entry["event"] == "transition"]
    told = Counter((line["reason"], line["why"]) for line in lines)
    assert not told - seen, "a line that no transition has"
    assert not events - seen, "an Event that no transition has"
    # One that ends while its last write is carried out does not hear that it was.
    assert (seen - told).total() <= _NUM_ENDED
    assert {line["resource"] for line in lines} == {f"LLMService/{site.namespace}/qwen"}
    reasons = Counter(line["reason"] for line in lines)
    once = ("RouterReady", "Deploying", "RollingOut", "Scaling")
    assert {reason: reasons[reason] for reason in once} == dict.fromkeys(once, 1), reasons
    others = Counter(_without_time(entry) for entry in entries if entry["event"] != "transition")
    assert set(others.values()) <= {1}, others
    assert not [entry for entry in entries if entry["level"] != "info"]


def _num_reconciles(operator: Any) -> float:
    return float(operator.metric("kvoy_operator_reconcile_total", kind="LLMService"))


def _is_on_its_way(site: Site) -> bool:
    revision = site.get("LLMService", "qwen")["status"]["revision"]
    return bool(revision["current"] != revision["update"])


def _wait_until_settled(site: Site) -> None:
    site.wait_for_condition("qwen", "Progressing", "False", "Settled")


def _events(site: Site) -> Counter[tuple[str, str]]:
    """Reason and message of each."""
    found = site.server.api.get(EVENT.path(site.namespace))["items"]
    return Counter(
        (each["reason"], each["note"])
        for each in found
        if each["regarding"]["kind"] == LLM_SERVICE.name
    )


def _without_time(entry: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in entry.items() if name != "time"})
