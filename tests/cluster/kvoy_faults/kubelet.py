"""Says of pods in the namespaces of a feed what a kubelet would, at once; a namespace may hold pods
back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvoy_cluster.api import MERGE_PATCH, ApiError
from kvoy_operated.kubelet import is_ready, ready_status
from kvoy_operator.kinds import POD, Kind
from kvoy_operator.observed import Body
from kvoy_operator_bench.client import Client

_NUM_WORKERS = 8


class Kubelet:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._due: asyncio.Queue[Body] = asyncio.Queue()
        self._held: dict[str, list[Body]] = {}
        self._policies: dict[str, Callable[[Body], bool]] = {}

    def hold(self, namespace: str, may_become_ready: Callable[[Body], bool]) -> None:
        """Other pods stay unready until `release`; this is asked once of each."""
        self._policies[namespace] = may_become_ready

    def release(self, namespace: str) -> None:
        self._policies.pop(namespace, None)
        for pod in self._held.pop(namespace, ()):
            self._due.put_nowait(pod)

    def see(self, kind: Kind, event_type: str, body: Body) -> None:
        """`feed.Listener`."""
        if kind != POD or event_type == "DELETED":
            return
        namespace = body["metadata"]["namespace"]
        if "deletionTimestamp" in body["metadata"]:
            self._due.put_nowait(body)
        elif event_type == "ADDED" and not is_ready(body):
            policy = self._policies.get(namespace)
            if policy is None or policy(body):
                self._due.put_nowait(body)
            else:
                self._held.setdefault(namespace, []).append(body)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_NUM_WORKERS):
                group.create_task(self._tend_forever())

    async def _tend_forever(self) -> None:
        while True:
            await self._tend(await self._due.get())

    async def _tend(self, pod: Body) -> None:
        metadata = pod["metadata"]
        path = POD.path(metadata["namespace"], metadata["name"])
        with contextlib.suppress(ApiError):  # gone since
            if "deletionTimestamp" in metadata:
                await self._client.request("DELETE", f"{path}?gracePeriodSeconds=0")
            else:
                status = {"status": ready_status(pod)}
                await self._client.request("PATCH", f"{path}/status", status, MERGE_PATCH)
