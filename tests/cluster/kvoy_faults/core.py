"""The deciding half of an operator, for one namespace: what `kvoy operator` does once it leads.

Starts in milliseconds, so that a test can end it at every single call.
"""

from __future__ import annotations

import asyncio

from kvoy_faults.doomed_api import DoomedApi
from kvoy_faults.feed import Feed
from kvoy_operator.api import Api
from kvoy_operator.children import Children
from kvoy_operator.cluster import Cluster
from kvoy_operator.events import EventPost
from kvoy_operator.kinds import LEADER_WORKER_SET, LLM_ROUTER, LLM_SERVICE, Kind
from kvoy_operator.metrics import Metrics
from kvoy_operator.observed import Body
from kvoy_operator.options import RenderOptions
from kvoy_operator.reconcile import Reconciler
from kvoy_operator.reconcile_router import RouterStory
from kvoy_operator.reconcile_service import ServiceStory
from kvoy_operator.record import Key, Record, Ref, record_of
from kvoy_operator.report import Reporter
from kvoy_operator.resync import Resync
from kvoy_operator.store import Store
from kvoy_operator.work_queue import WorkQueue

_RESYNC_S = 3600.0
_NUM_WORKERS = 2


class Core:
    """`run` until it is cancelled or killed; `see` everything that the feed brings."""

    def __init__(self, api: Api, feed: Feed, namespace: str, options: RenderOptions) -> None:
        self.api = DoomedApi(api)
        self._store = Store()
        self._store.has_lws = LEADER_WORKER_SET in feed.kinds
        self._resync = Resync(
            self.api, self._store, [namespace], lambda: feed.kinds, self._put, self._gone
        )
        cluster = Cluster(self.api, self._put_own, self._store.remove)
        self._events = EventPost(self.api, "core")
        reporter = Reporter(cluster, self._events)
        children, metrics = Children(cluster), Metrics()
        service = ServiceStory(self._store, cluster, children, reporter, options, metrics)
        router = RouterStory(self._store, cluster, children, reporter, options)
        self._reconcile = Reconciler(
            {LLM_SERVICE.name: service.reconcile, LLM_ROUTER.name: router.reconcile},
            metrics,
            _RESYNC_S,
        )
        self._queue = WorkQueue(self._work, num_workers=_NUM_WORKERS)
        self._looks: dict[Key, int] = {}
        self._looked = asyncio.Event()
        for kind, body in feed.objects(namespace).values():
            self._store.put(record_of(kind, body))

    def see(self, kind: Kind, event_type: str, body: Body) -> None:
        """`feed.Listener`."""
        record = record_of(kind, body)
        if event_type == "DELETED":
            self._gone(record.ref, record.uid)
        else:
            self._put(record)

    async def run(self) -> None:
        """Raises Killed, in a group."""
        await self._resync.run_once()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.run())
            group.create_task(self._queue.run())
            await asyncio.sleep(0)  # the queue is open from now on
            self._add(set(self._store.all_keys()))

    async def look_again(self) -> None:
        """Work once more on every resource, and return when that is done."""
        before = dict(self._looks)
        keys = self._store.all_keys()
        self._add(set(keys))
        while any(self._looks.get(key, 0) <= before.get(key, 0) for key in keys):
            await self._looked.wait()
            self._looked.clear()

    async def _work(self, key: Key) -> float | None:
        delay_s = await self._reconcile(key)
        self._looks[key] = self._looks.get(key, 0) + 1
        self._looked.set()
        return delay_s

    def _put(self, record: Record) -> None:
        self._add(self._store.put(record))

    def _put_own(self, record: Record) -> None:
        self._add(self._store.put(record) - set(record.keys))

    def _gone(self, ref: Ref, uid: str) -> None:
        self._add(self._store.remove(ref, uid))

    def _add(self, keys: set[Key]) -> None:
        for key in keys:
            self._queue.add(key)


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end. Raises what it has ended with."""
    while not task.done():
        # A death at the same moment hides that it was cancelled.
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
    if not task.cancelled():
        task.result()
