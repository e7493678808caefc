"""Says of every pod that it runs and is ready, as soon as a watch shows it."""

from __future__ import annotations

import asyncio
import contextlib

from kvoy_cluster.api import MERGE_PATCH, ApiError
from kvoy_operated.kubelet import is_ready, ready_status
from kvoy_operator.kinds import POD
from kvoy_operator_bench.client import Body, Client

_NUM_WORKERS = 16


class WatchingKubelet:
    """Over the pods of all namespaces with the operator's label; each is spoken for once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._unready: asyncio.Queue[Body] = asyncio.Queue()
        self._seen: set[str] = set()  # uids

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_NUM_WORKERS):
                group.create_task(self._tend_forever())
            await self._client.watch(POD.path(None), POD.label_selector, self._see)

    def _see(self, event_type: str, pod: Body) -> None:
        uid = pod["metadata"]["uid"]
        if event_type == "ADDED" and uid not in self._seen:
            self._seen.add(uid)
            if not is_ready(pod):
                self._unready.put_nowait(pod)

    async def _tend_forever(self) -> None:
        while True:
            pod = await self._unready.get()
            metadata = pod["metadata"]
            path = POD.path(metadata["namespace"], metadata["name"], "status")
            with contextlib.suppress(ApiError):  # gone since
                await self._client.request(
                    "PATCH", path, {"status": ready_status(pod)}, MERGE_PATCH
                )
