"""A real operator behind a proxy that fails: it always gets there, and disturbs no engine.

`KVOY_OUTAGE_S` sets how long the API server is away; a leader gives up after eight seconds.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.waiting import wait_for
from kvoy_faults.faults import Call, Cut, Fault, Refuse
from kvoy_faults.proxy import FaultProxy
from kvoy_operated import OperatorProcess, Site
from kvoy_operated.kubelet import is_ready

pytestmark = pytest.mark.slow

_TIMEOUT_S = 240.0
"""Of whatever takes seconds on an idle machine."""
_OUTAGE_S = float(os.environ.get("KVOY_OUTAGE_S", "12"))
_NUM_REPLICAS = 2
_NEWER = {"args": ["--max-num-seqs=64"]}
_STORM: tuple[Fault, ...] = (
    Refuse(409),
    Refuse(429, retry_after_s=1),
    Refuse(500),
    Refuse(503),
    Refuse(504),
    Cut(is_applied=False),
    Cut(is_applied=True),
)
_STORM_SHARE = 0.25
"""Of all calls, reads and dry runs included."""


class _Disturbed(Site):
    """A site whose operators reach the API server by the proxy."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        super().__init__(server, folder)
        self.proxy = FaultProxy(server.keys, self.user, self.kubeconfig)
        self.kubeconfig = self.proxy.kubeconfig

    def close(self) -> None:
        super().close()
        self.proxy.close()

    def engines(self) -> list[dict[str, Any]]:
        return self.all("Deployment", "kvoy.dev/component=engine")

    def serving(self) -> int:
        """Pods that serve now."""
        return sum(
            is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
            for pod in self.all("Pod", "kvoy.dev/component=engine")
        )

    def settle(self, **spec: Any) -> None:
        self.apply("qwen", replicas=_NUM_REPLICAS, **spec)
        self.wait_for_condition("qwen", "Ready", "True", "AllReady")
        self.wait_for_condition("qwen", "Progressing", "False", "Settled")

    def roll_out(self) -> int:
        """To another revision; how few pods were serving on the way."""
        (old,) = self.engines()
        self.apply("qwen", replicas=_NUM_REPLICAS, engine=_NEWER)
        least = [self.serving()]

        def is_done() -> bool:
            least.append(self.serving())
            names = [each["metadata"]["name"] for each in self.engines()]
            condition = self.condition("qwen", "Progressing")
            return (
                len(names) == 1
                and names != [old["metadata"]["name"]]
                and condition["reason"] == "Settled"
            )

        self.wait_until(is_done, "rollout finished")
        return min(least)


@pytest.fixture
def site(api_server: ApiServer, kvoy_crds: None, tmp_path: Path) -> Iterator[_Disturbed]:
    site = _Disturbed(api_server, tmp_path)
    yield site
    site.close()


def _fingerprint(site: _Disturbed) -> dict[str, tuple[str, int]]:
    """uid and generation of the engines' workloads, uid of their pods."""
    objects = [*site.engines(), *site.all("Pod", "kvoy.dev/component=engine")]
    return {
        f"{each.get('kind', '')} {each['metadata']['name']}": (
            each["metadata"]["uid"],
            each["metadata"].get("generation", 0),
        )
        for each in objects
    }


def _killer(
    operator: OperatorProcess, at: int, *, is_applied: bool
) -> Callable[[Call], Fault | None]:
    """Kills the operator at one of its writes: at the first one from number `at` on."""
    deaths = iter([Cut(is_applied, lambda: os.kill(operator.pid, signal.SIGKILL))])

    def decide(call: Call) -> Fault | None:
        is_it = call.is_write and not call.is_lease and call.number >= at
        return next(deaths, None) if is_it else None

    return decide


@pytest.mark.parametrize(("at", "is_applied"), [(5, False), (13, True)])
def test_a_process_killed_at_a_write_is_replaced_by_one_that_goes_on(
    site: _Disturbed, at: int, is_applied: bool
) -> None:
    site.start_kubelet()
    first = site.start_operator()
    site.proxy.decide = _killer(first, at, is_applied=is_applied)

    site.apply("qwen", replicas=_NUM_REPLICAS)
    _wait_for_end(first)
    second = site.start_operator()

    site.wait_for_condition("qwen", "Ready", "True", "AllReady")
    num_writes = site.proxy.calls[-1].number
    site.proxy.decide = _killer(second, num_writes + at // 2, is_applied=is_applied)
    site.apply("qwen", replicas=_NUM_REPLICAS, engine=_NEWER)
    _wait_for_end(second)
    site.start_operator()
    site.wait_for_condition("qwen", "Progressing", "False", "Settled")
    # A service is settled while its old pods still drain.
    site.wait_until(lambda: len(site.engines()) == 1, "the old revision is gone")
    assert site.serving() == _NUM_REPLICAS


def test_an_api_server_that_is_away_disturbs_no_engine(site: _Disturbed) -> None:
    site.start_kubelet()
    operator = site.start_operator()
    site.settle()
    before = _fingerprint(site)

    site.proxy.is_down = True
    site.apply("qwen", replicas=_NUM_REPLICAS + 1)
    deadline_s = time.monotonic() + _OUTAGE_S
    operators = [operator]
    while time.monotonic() < deadline_s:
        operators = _as_kubernetes_does(site, operators)
        time.sleep(0.2)
    assert _fingerprint(site) == before
    site.proxy.is_down = False

    def is_there() -> bool:
        # One that gave its Lease up in the outage may end only now.
        nonlocal operators
        operators = _as_kubernetes_does(site, operators)
        generation = site.get("LLMService", "qwen")["metadata"]["generation"]
        ready = site.condition("qwen", "Ready")
        return (ready["reason"], ready["observedGeneration"]) == ("AllReady", generation)

    wait_for(is_there, "all replicas are ready", _TIMEOUT_S)
    (engine,) = site.engines()
    assert engine["spec"]["replicas"] == _NUM_REPLICAS + 1
    after = _fingerprint(site)
    assert {name: after[name] for name in before if name.startswith("Pod")} == {
        name: value for name, value in before.items() if name.startswith("Pod")
    }


def test_watches_that_are_cut_or_freeze_lose_nothing(site: _Disturbed) -> None:
    site.start_kubelet()
    site.start_operator()
    site.settle()
    before = _fingerprint(site)

    for _ in range(3):
        site.proxy.cut_watches()
        site.delete("Service", "qwen")
        site.wait_until(lambda: site.exists("Service", "qwen"), "service is back")
    site.proxy.are_watches_frozen = True
    site.delete("Service", "qwen-engines")
    site.delete("PodDisruptionBudget", "qwen-router")
    site.proxy.cut_watches()
    site.proxy.are_watches_frozen = False

    site.wait_until(lambda: site.exists("Service", "qwen-engines"), "service is back")
    site.wait_until(lambda: site.exists("PodDisruptionBudget", "qwen-router"), "budget is back")
    assert _fingerprint(site) == before
    assert site.roll_out() >= _NUM_REPLICAS


def test_a_watch_that_fails_for_good_does_not_leave_the_operator_deaf(site: _Disturbed) -> None:
    def decide(call: Call) -> Fault | None:
        # No client takes that for something to wait out.
        return Refuse(400) if call.method == "GET" and call.path.endswith("/pods") else None

    site.proxy.decide = decide
    site.start_kubelet()
    operator = site.start_operator()
    site.wait_until(lambda: operator.lines("watch ended; starts again"), "it is begun anew")
    site.proxy.decide = lambda call: None

    site.settle()
    assert site.roll_out() >= _NUM_REPLICAS


def test_a_rollout_upon_old_news_takes_no_capacity(site: _Disturbed) -> None:
    site.start_kubelet()
    site.start_operator()
    site.settle()

    site.proxy.watch_delay_s = 1.5

    assert site.roll_out() >= _NUM_REPLICAS
    (engine,) = site.engines()
    assert engine["spec"]["replicas"] == _NUM_REPLICAS


def test_a_storm_of_refusals_and_lost_answers_only_takes_time(site: _Disturbed) -> None:
    site.start_kubelet()
    site.start_operator()
    storm, draw = itertools.cycle(_STORM), random.Random(1)
    seen: set[Fault] = set()

    def decide(call: Call) -> Fault | None:
        if call.is_lease or draw.random() > _STORM_SHARE:
            return None
        fault = next(storm)
        seen.add(fault)
        return fault

    site.proxy.decide = decide
    site.settle()
    settled = _fingerprint(site)
    least = site.roll_out()

    assert least >= _NUM_REPLICAS
    assert not settled.keys() & _fingerprint(site).keys()
    assert seen == set(_STORM)


def test_an_upgrade_with_other_images_changes_no_engine(site: _Disturbed) -> None:
    site.start_kubelet()
    old = site.start_operator()
    site.settle(engine={"kind": "sim"}, prefill={"replicas": 1})
    before = _fingerprint(site)

    assert old.terminate() == 0
    images = [f"--{part}-image=elsewhere/{part}:2" for part in ("router", "engine", "sim")]
    site.start_operator(*images, "--image-pull-policy=Always")

    def router_image() -> str:
        pod = site.get("Deployment", "qwen-router")["spec"]["template"]["spec"]
        return str(pod["containers"][0]["image"])

    site.wait_until(lambda: router_image() == "elsewhere/router:2", "router rolls")
    site.wait_for_condition("qwen", "Ready", "True", "AllReady")
    assert _fingerprint(site) == before
    site.settle(engine={"kind": "sim", **_NEWER}, prefill={"replicas": 1})

    def engine_images() -> set[str]:
        specs = [engine["spec"]["template"]["spec"] for engine in site.engines()]
        return {str(container["image"]) for spec in specs for container in spec["containers"]}

    # A service is settled while its old pods still drain.
    site.wait_until(lambda: engine_images() == {"elsewhere/sim:2"}, "the old revision is gone")


def _wait_for_end(operator: OperatorProcess) -> None:
    wait_for(lambda: not operator.is_running, "the operator is killed", _TIMEOUT_S)


def _as_kubernetes_does(
    site: _Disturbed, operators: list[OperatorProcess]
) -> list[OperatorProcess]:
    """Start another operator when the last one has ended."""
    if operators[-1].is_running:
        return operators
    return [*operators, site.start_operator()]
