"""What somebody else writes in the moment of an own write is seen, on a real API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvoy_cluster.api import APPLY_PATCH, MERGE_PATCH
from kvoy_cluster.api_server import ApiServer
from kvoy_faults.core import Core, end
from kvoy_faults.life import World
from kvoy_faults.world import make_world
from kvoy_operator.api import JSON, Api
from kvoy_operator.kinds import LLM_ROLE_SCALER, LLM_ROUTER, LLM_SERVICE, Kind
from kvoy_operator.observed import Body
from kvoy_operator.record import Ref

pytestmark = pytest.mark.slow

_TIMEOUT_S = 240.0
_SPEC: dict[str, Any] = {
    "model": {"uri": "hf://Qwen/Qwen3-0.6B"},
    "engine": {"kind": "sim"},
    "replicas": 1,
    "prefill": {"replicas": 1},
    "router": {"ref": "all"},
}


class _Meddled(Api):
    """`api`, where something happens just before the next write to one path, of which no watch has
    told when its answer comes."""

    def __init__(self, api: Api, tell: Callable[[Kind, str, Body], None]) -> None:
        """`tell` is who listens to the watches, through `see`."""
        self._api = api
        self._tell = tell
        self._held: list[tuple[Kind, str, Body]] | None = None
        self._path = ""
        self._meddle: Callable[[], Awaitable[object]] | None = None

    def arm(self, path: str, meddle: Callable[[], Awaitable[object]]) -> None:
        self._path, self._meddle = path, meddle

    @property
    def has_meddled(self) -> bool:
        return self._meddle is None and self._held is None

    def see(self, kind: Kind, event_type: str, body: Body) -> None:
        """`feed.Listener`."""
        if self._held is not None:
            self._held.append((kind, event_type, body))
        else:
            self._tell(kind, event_type, body)

    async def raw(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
        timeout_s: float | None = None,
    ) -> bytes:
        meddle = self._meddle
        is_it = method != "GET" and path == self._path and meddle is not None
        if is_it and meddle is not None:
            self._meddle, self._held = None, []
            await meddle()
        answer = await self._api.raw(
            method,
            path,
            params=params,
            body=body,
            content_type=content_type,
            accept=accept,
            timeout_s=timeout_s,
        )
        if is_it:
            # Once who has asked knows the answer, which takes it no turn of the loop.
            asyncio.get_running_loop().call_soon(self._release)
        return answer

    def _release(self) -> None:
        held, self._held = self._held or [], None
        for event in held:
            self._tell(*event)


class _Scene:
    """One service with a pool for prefill behind a shared router, and who operates them."""

    def __init__(self, world: World, namespace: str) -> None:
        self._world = world
        self._namespace = namespace
        self.api = _Meddled(world.api, lambda *event: self._core.see(*event))
        world.feed.listen(namespace, world.kubelet.see)
        world.feed.listen(namespace, self.api.see)
        self._core = Core(self.api, world.feed, namespace, world.options)

    @asynccontextmanager
    async def operated(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._core.run())
        try:
            await self._apply(LLM_ROUTER, "all", {})
            await self._apply(LLM_SERVICE, "qwen", _SPEC)
            await self._until(self._is_settled)
            yield
        finally:
            await end(task)
            self._world.feed.forget(self._namespace)

    async def edit_beside_status(self, kind: Kind, name: str, spec: Mapping[str, Any]) -> None:
        """Change the spec in the moment when the operator writes the status, and wait until it has
        done what the spec says."""
        path = kind.path(self._namespace, name)
        edited: list[int] = []

        async def edit() -> None:
            change = {"spec": spec}
            made = await self._world.client.request("PATCH", path, change, MERGE_PATCH)
            edited.append(made["metadata"]["generation"])

        self.api.arm(f"{path}/status", edit)
        # What makes the operator write: somebody has spoilt the status.
        spoilt = {"status": {"observedGeneration": 0}}
        await self._world.client.request("PATCH", f"{path}/status", spoilt, MERGE_PATCH)
        await self._until(lambda: self.api.has_meddled)
        await self._until(lambda: self._observed_generation(kind, name) == edited[0])
        await self._until(self._is_settled)

    async def _apply(self, kind: Kind, name: str, spec: Mapping[str, Any]) -> None:
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name},
            "spec": spec,
        }
        path = f"{kind.path(self._namespace, name)}?fieldManager=user&force=true"
        await self._world.client.request("PATCH", path, body, APPLY_PATCH)

    def _body(self, kind: Kind, name: str) -> Body:
        objects = self._world.feed.objects(self._namespace)
        return objects.get(Ref(kind.name, self._namespace, name), (kind, {}))[1]

    def _observed_generation(self, kind: Kind, name: str) -> int | None:
        status: Body = self._body(kind, name).get("status") or {}
        return status.get("observedGeneration")

    def _is_settled(self) -> bool:
        status = self._body(LLM_SERVICE, "qwen").get("status") or {}
        reasons = {each["type"]: each["reason"] for each in status.get("conditions") or ()}
        return (reasons.get("Progressing"), reasons.get("Ready")) == ("Settled", "AllReady")

    async def _until(self, check: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not check():
            assert time.monotonic() < deadline_s, self._core.describe()
            await asyncio.sleep(0.02)


async def test_an_edit_beside_an_own_write_is_not_lost(
    api_server: ApiServer, kvoy_crds: None
) -> None:
    async with make_world(api_server, has_lws=False) as world:
        namespace = await asyncio.to_thread(api_server.create_namespace)
        scene = _Scene(world, namespace)
        async with scene.operated():
            await scene.edit_beside_status(LLM_SERVICE, "qwen", {"replicas": 2})
            await scene.edit_beside_status(LLM_ROUTER, "all", {"replicas": 2})
            await scene.edit_beside_status(LLM_ROLE_SCALER, "qwen-prefill", {"replicas": 2})
