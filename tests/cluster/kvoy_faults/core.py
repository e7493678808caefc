"""The deciding half of an operator, for one namespace: what `kvoy operator` does once it leads.

Starts in milliseconds, so that a test can end it at every single call.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

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
from kvoy_operator.own_write import Write
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
        self._told: dict[Key, tuple[float, str]] = {}
        """When what came of a key, for `describe`."""
        self._looked = asyncio.Event()
        self._has_ended = False
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
        try:
            await self._resync.run_once()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._events.run())
                group.create_task(self._queue.run())
                await asyncio.sleep(0)  # the queue is open from now on
                self._add(set(self._store.all_keys()))
        finally:
            self._has_ended = True
            self._looked.set()

    async def look_again(self) -> bool:
        """Work once more on every resource. Returns whether that is done: not where this operator
        ends before, as one does that is killed by the answer to its last write."""
        before = dict(self._looks)
        keys = self._store.all_keys()
        self._add(set(keys))
        while any(self._looks.get(key, 0) <= before.get(key, 0) for key in keys):
            if self._has_ended:
                return False
            await self._looked.wait()
            self._looked.clear()
        return True

    def describe(self) -> dict[str, Any]:
        """What it does and waits for, for the message of a test that fails."""
        now_s = time.monotonic()
        return {
            "queue": f"{self._queue.depth} due, {self._queue.num_failing} failing",
            "work": {
                str(key): f"{what}, {now_s - since_s:.1f} s ago"
                for key, (since_s, what) in self._told.items()
            },
            "knows": {
                str(key): _generations(self._store.custom(key)) for key in self._store.all_keys()
            },
            "api": self.api.describe(),
        }

    async def _work(self, key: Key) -> float | None:
        self._told[key] = (time.monotonic(), "began")
        try:
            delay_s = await self._reconcile(key)
        except BaseException as error:
            self._told[key] = (time.monotonic(), repr(error))
            raise
        self._told[key] = (time.monotonic(), f"done, again in {delay_s} s")
        self._looks[key] = self._looks.get(key, 0) + 1
        self._looked.set()
        return delay_s

    def _put(self, record: Record) -> None:
        self._add(self._store.put(record))

    def _put_own(self, record: Record, write: Write) -> None:
        self._add(self._store.put_own(record, write))

    def _gone(self, ref: Ref, uid: str) -> None:
        self._add(self._store.remove(ref, uid))

    def _add(self, keys: set[Key]) -> None:
        for key in keys:
            self._queue.add(key)


def _generations(custom: Body | None) -> str:
    if custom is None:
        return "gone"
    metadata, status = custom["metadata"], custom.get("status") or {}
    return (
        f"version {metadata['resourceVersion']}, generation {metadata['generation']}, "
        f"observed {status.get('observedGeneration')}"
    )


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end. Raises what it has ended with."""
    while not task.done():
        # A death at the same moment hides that it was cancelled.
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
    if not task.cancelled():
        task.result()
