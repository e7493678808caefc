"""One operator: everything joined, from the kubeconfig to the queue. Made by `__main__` and tests.

Watches run whether or not this operator leads, so that who takes over knows the cluster already;
only the leader reconciles. Nothing is decided before the store is known to be complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvoy_operator.api import Api, load_kubeconfig
from kvoy_operator.api_errors import ApiFailure
from kvoy_operator.children import Children
from kvoy_operator.cluster import Cluster
from kvoy_operator.config import OperatorConfig, own_identity
from kvoy_operator.connectivity import Connectivity
from kvoy_operator.events import EventPost
from kvoy_operator.kinds import LEADER_WORKER_SET, LLM_ROUTER, LLM_SERVICE, Kind
from kvoy_operator.leader import LeaderElection
from kvoy_operator.master_secret import load_master_secret
from kvoy_operator.metrics import Metrics
from kvoy_operator.own_write import Write
from kvoy_operator.reconcile import Reconciler
from kvoy_operator.reconcile_router import RouterStory
from kvoy_operator.reconcile_service import ServiceStory
from kvoy_operator.record import Key, Record, Ref
from kvoy_operator.report import Reporter
from kvoy_operator.resync import Resync
from kvoy_operator.store import Store
from kvoy_operator.watch_health import WatchHealth
from kvoy_operator.watchdog import build_app, serve
from kvoy_operator.watches import Watches
from kvoy_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 2.0
_TURN_S = 5.0
"""So long a reconcile is the only one that has begun so lately: many times what one takes. Several
at once are each slower by as much on a busy API server, and nothing is done earlier."""
_LOOK_S = 10.0
"""Between two looks whether a watch began anew."""
_DOUBT_S = 60.0
"""Until the next resync when one has found what a watch had not brought."""


class Operator:
    def __init__(self, config: OperatorConfig) -> None:
        """Raises lightkube's ConfigError without a usable kubeconfig."""
        self._config = config
        kubeconfig = load_kubeconfig(config.kubeconfig)
        self._identity = own_identity()
        self.metrics = Metrics()
        self._connectivity = Connectivity()
        self._api = Api(kubeconfig, self._observe_call)
        self._store = Store()
        self._health = WatchHealth()
        self._queue: WorkQueue[Key] | None = None
        self._resync = Resync(
            self._api,
            self._store,
            config.namespace,
            lambda: self._watches.kinds(),
            self._put,
            self._gone,
            self._health.missed,
        )
        self._watches = Watches(
            self._api,
            kubeconfig,
            config.namespace,
            self._health,
            self._put,
            self._gone,
            self._optional_kind_changed,
        )
        self._election = LeaderElection(
            self._api, config.own_namespace, config.lease_name, self._identity
        )
        self.metrics.watch_queue(
            lambda: self._queue.depth if self._queue else 0,
            lambda: self._queue.oldest_age_s if self._queue else 0.0,
            self._health.ages_s,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Operate until `stop`. Raises LeadershipLost, OSError when the port is taken."""
        app = build_app(self.metrics, self._health, self._watches.is_ready.is_set)
        runner = await serve(app, self._config.host, self._config.port)
        try:
            async with asyncio.TaskGroup() as group:
                watches = group.create_task(self._watches.run(), name="watches")
                lead = group.create_task(self._lead(), name="lead")
                await stop.wait()
                # The Lease first: another operator need not wait until the watches have ended.
                lead.cancel()
                await asyncio.wait([lead])
                watches.cancel()
        finally:
            await self._api.close()
            await runner.cleanup()

    async def _lead(self) -> None:
        await self._watches.is_ready.wait()
        await self._election.acquire()
        self.metrics.leader.set(1)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._election.hold(), name="lease")
                group.create_task(self._work(), name="work")
        finally:
            self.metrics.leader.set(0)
            await self._election.release()

    async def _work(self) -> None:
        config = self._config
        secret = await _until_answered(
            lambda: load_master_secret(self._api, config.own_namespace, config.master_secret_name)
        )
        await _until_answered(self._resync.run_once)
        options = config.render_options(secret)
        cluster = Cluster(
            self._api, self._put_own, self._store.remove, lambda: self._election.may_act
        )
        events = EventPost(self._api, self._identity)
        reporter, children = Reporter(cluster, events), Children(cluster)
        service = ServiceStory(self._store, cluster, children, reporter, options, self.metrics)
        router = RouterStory(self._store, cluster, children, reporter, options)
        reconcile = Reconciler(
            {LLM_SERVICE.name: service.reconcile, LLM_ROUTER.name: router.reconcile},
            self.metrics,
            config.resync_s,
        )
        self._queue = WorkQueue(reconcile, num_workers=config.workers, turn_s=_TURN_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(events.run(), name="events")
            group.create_task(self._queue.run(), name="queue")
            group.create_task(self._resync_forever(), name="resync")
            await asyncio.sleep(0)  # the queue is open from now on
            self._add(set(self._store.all_keys()))

    async def _resync_forever(self) -> None:
        """Every `resync_s`, and soon after a watch had to begin anew or has left something out."""
        loop, resync_s = asyncio.get_running_loop(), self._config.resync_s
        due_s, num_lists = loop.time() + resync_s, self._health.num_lists
        while True:
            await asyncio.sleep(min(_LOOK_S, resync_s))
            if loop.time() < due_s and num_lists == self._health.num_lists:
                continue
            started_s, num_lists = loop.time(), self._health.num_lists
            num_missed = await _until_answered(self._resync.run_once)
            due_s = started_s + (min(_DOUBT_S, resync_s) if num_missed else resync_s)

    async def _optional_kind_changed(self, kind: Kind, is_watched: bool) -> None:
        if is_watched:
            # Decisions need all of its objects, not the first few that a watch brings.
            await _until_answered(lambda: self._resync.run_once(kinds=[kind]))
        else:
            self._add(self._store.forget_kind(kind.name))
        if kind == LEADER_WORKER_SET:
            self._store.has_lws = is_watched
        self._add({key for key in self._store.all_keys() if key.kind == LLM_SERVICE.name})

    def _observe_call(self, method: str, path: str, code: int) -> None:
        self.metrics.observe_call(method, path, code)
        self._connectivity.observe_call(method, path, code)

    def _put(self, record: Record) -> None:
        self._add(self._store.put(record))

    def _put_own(self, record: Record, write: Write) -> None:
        self._add(self._store.put_own(record, write))

    def _gone(self, ref: Ref, uid: str) -> None:
        self._add(self._store.remove(ref, uid))

    def _add(self, keys: set[Key]) -> None:
        if self._queue is not None:
            for key in keys:
                self._queue.add(key)


async def _until_answered(call: Callable[[], Awaitable[T]]) -> T:
    reported = ""
    while True:
        try:
            return await call()
        except ApiFailure as error:
            if str(error) != reported:
                reported = str(error)
                log.warning("waits for the API server", extra={"error": reported})
            await asyncio.sleep(_RETRY_S)
