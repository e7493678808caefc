"""What a router does when the Kubernetes API goes, comes back, refuses, or has much to tell."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import yaml

from kvoy_cluster.control_plane import ControlPlane
from kvoy_cluster.waiting import wait_for
from kvoy_router import kube_api
from kvoy_router.errors import KubeError
from kvoy_router.testing import eventually
from kvoy_scene.cutter import Cutter
from kvoy_scene.scene import WAIT_S, Scene, StartEngine, ask, call, names, routable

pytestmark = pytest.mark.slow


async def test_a_router_serves_on_while_the_api_restarts_and_catches_up_after(
    scene: Scene, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service, 2)
    async with scene.router() as router:
        engines = await scene.start_engines(start_engine, "qwen-s-r1", service, 2)
        await routable(router, *engines.values())

        scene.server.processes.stop("kube-apiserver")
        await eventually(lambda: "Kubernetes API fails" in caplog.text, WAIT_S)
        away = [await ask(router) for _ in range(4)]
        metrics = (await call(router, "GET", "/metrics")).text
        ready = await call(router, "GET", "/ready")
        scene.server.processes.restart("kube-apiserver")
        await eventually(lambda: "Kubernetes API answers again" in caplog.text, 60.0)
        scene.scale("qwen-s-r1", 3)
        pods = {pod["metadata"]["name"] for pod in await scene.pods_of("qwen-s-r1", 3)}
        (new,) = pods - set(engines)
        scene.give_address(new)
        await eventually(lambda: names(router) == pods, WAIT_S)

        assert [answer.status_code for answer in away] == [200] * 4
        assert "kvoy_router_kubernetes_up 0.0" in metrics
        assert ready.status_code == 200
        assert caplog.text.count("Kubernetes API fails") == 1


async def test_a_watch_that_is_cut_loses_nothing(scene: Scene) -> None:
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service, 3)
    cutter = Cutter(scene.server.place.api_port)
    scene.reach_api_at(await cutter.listen())
    async with scene.router() as router:
        first, second, third = (p["metadata"]["name"] for p in await scene.pods_of("qwen-s-r1", 3))
        scene.give_address(first)
        await eventually(lambda: names(router) == {first}, WAIT_S)

        cutter.cut()
        scene.give_address(second)
        await eventually(lambda: names(router) == {first, second}, WAIT_S)
        scene.delete_pod(first, at_once=True)
        cutter.cut()
        scene.give_address(third)

        await eventually(lambda: names(router) == {second, third}, WAIT_S)
    await cutter.close()


async def test_a_connection_that_has_gone_silent_is_given_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_api, "_SILENCE_S", 0.5)
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service, 2)
    cutter = Cutter(scene.server.place.api_port)
    scene.reach_api_at(await cutter.listen())
    async with scene.router() as router:
        first, second = (p["metadata"]["name"] for p in await scene.pods_of("qwen-s-r1", 2))
        scene.give_address(first)
        await eventually(lambda: names(router) == {first}, WAIT_S)

        cutter.freeze()
        scene.give_address(second)

        await eventually(lambda: names(router) == {first, second}, WAIT_S)
    await cutter.close()


async def test_a_token_that_has_ended_is_replaced_by_the_one_in_its_file(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_api, "_SILENCE_S", 0.5)  # the watch is made again that often
    scene.token_file.write_text(scene.make_token(bound_to_secret="first"))
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service, 2)
    async with scene.router() as router:
        first, second = (p["metadata"]["name"] for p in await scene.pods_of("qwen-s-r1", 2))
        scene.give_address(first)
        await eventually(lambda: names(router) == {first}, WAIT_S)

        scene.server.api.request("DELETE", scene.path("secrets", "first"))
        await eventually(lambda: router.sources.has_kubernetes is False, WAIT_S)
        scene.give_address(second)
        scene.token_file.write_text(scene.make_token())

        await eventually(lambda: names(router) == {first, second}, WAIT_S)


async def watch_to_the_end(api: kube_api.KubeApi, namespace: str, version: str) -> None:
    async with api.watching_pods(namespace, "a=b", version, 5) as events:
        async for _ in events:
            pass


async def test_a_version_that_the_server_has_forgotten_is_told_as_gone(scene: Scene) -> None:
    server = scene.server
    server.processes.restart("kube-apiserver")  # it remembers what has happened since its start
    await asyncio.to_thread(wait_for, lambda: server.api.get("/readyz") == "ok", "API server")
    async with kube_api.open_api(kube_api.load_config()) as api:
        with pytest.raises(KubeError) as told:
            await watch_to_the_end(api, scene.namespace, version="1")

    assert told.value.status == 410


async def test_the_account_may_do_nothing_else(scene: Scene) -> None:
    async with kube_api.open_api(kube_api.load_config()) as api:
        with pytest.raises(KubeError) as told:
            await api.list_pods("default", "")

    assert told.value.status == 403
    allowed = scene.server.kubectl(
        "auth", "can-i", "--list", "-n", scene.namespace,
        f"--as=system:serviceaccount:{scene.namespace}:router",
    )  # fmt: skip
    assert "secrets" not in allowed


async def test_two_hundred_pods_come_and_go(scene: Scene) -> None:
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service, 200)
    # A call of theirs may time out and be carried out: then there are more for a moment.
    await scene.until_made("qwen-s-r1", 200)
    pods = await scene.pods_of("qwen-s-r1", 200)
    for pod in pods[:100]:
        scene.give_address(pod["metadata"]["name"])
    async with scene.router() as router:
        await eventually(lambda: len(router.pool.endpoints) == 100, WAIT_S)

        for pod in pods[100:]:
            scene.give_address(pod["metadata"]["name"])
            await asyncio.sleep(0)
        await eventually(lambda: len(router.pool.endpoints) == 200, WAIT_S)
        for pod in pods:
            scene.end_pod(pod["metadata"]["name"])
            await asyncio.sleep(0)

        await eventually(lambda: len(router.pool.endpoints) == 0, WAIT_S)
        assert pods[0]["metadata"]["name"].encode() not in router.metrics.expose()


async def test_of_a_group_only_the_leader_is_an_engine(
    control_plane: ControlPlane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crds = Path(__file__).parents[2] / "crds" / "llmservices.kvoy.dev.yaml"
    control_plane.install_crds(list(yaml.safe_load_all(crds.read_text())))
    scene = Scene(control_plane, tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(scene.kubeconfig))
    service = scene.add_service("big")
    labels = scene.labels("big", pool="serving", revision="r1")
    template = {"metadata": {"labels": labels}, "spec": scene.pod_spec()}
    body = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "big-s-r1", "ownerReferences": [scene.owner(service)]},
        "spec": {
            "replicas": 2,
            "leaderWorkerTemplate": {
                "size": 2, "leaderTemplate": template, "workerTemplate": template
            },
        },
    }  # fmt: skip
    scene.create("leaderworkersets", body, "apis/leaderworkerset.x-k8s.io/v1")
    await eventually(lambda: len(scene.pods()) == 4, WAIT_S)

    async with scene.router() as router:
        for pod in scene.pods():
            scene.give_address(pod["metadata"]["name"])

        await eventually(lambda: names(router) == {"big-s-r1-0", "big-s-r1-1"}, WAIT_S)
        await asyncio.sleep(0.5)
        assert names(router) == {"big-s-r1-0", "big-s-r1-1"}
