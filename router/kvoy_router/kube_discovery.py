"""Engines from the pods of a namespace: list, watch, verify who owns them, publish.

    list → watch for minutes, from bookmark to bookmark → watch again …   any failure: pause, list

While the API is away everything stays as it was known: pods that were verified go on serving. A pod
whose owner has not been verified gets nothing, however it is labelled. Three tasks share the state
on one event loop: one follows the pods, one looks up owners, one notices what has left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable, Sequence

import msgspec

from kvoy_contract.fleet import Fleet
from kvoy_contract.names import COMPONENT_LABEL, ENGINE_COMPONENT, SERVICE_LABEL
from kvoy_router import kube_owners, kube_pods
from kvoy_router.errors import KubeError
from kvoy_router.found import FoundEngine
from kvoy_router.kube_api import KubeApi
from kvoy_router.kube_objects import AnyObject, OwnerReference, Pod, WatchEvent
from kvoy_router.kube_trust import Trust

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 15.0
_WATCH_S = (180, 270)
"""How long one watch lasts, at random between these so that a fleet of routers does not reconnect
at once."""
_STEADY_S = 5.0
"""What fails sooner has failed; what worked longer has only ended."""
_COALESCE_S = 0.05
_SWEEP_S = 1.0
_MAX_NAMED_SERVICES = 50
"""Above it the list of services makes the selector too long, and all engines are watched."""

OpenApi = Callable[[], contextlib.AbstractAsyncContextManager[KubeApi]]


class KubeDiscovery:
    """`publish` hears of the whole list of engines whenever it may have changed."""

    def __init__(
        self,
        namespace: str,
        open_api: OpenApi,
        publish: Callable[[Sequence[FoundEngine]], None],
        is_lost: Callable[[str], bool],
        now_s: Callable[[], float],
    ) -> None:
        """`is_lost` says whether the telemetry of an endpoint has broken off."""
        self._namespace = namespace
        self._open_api = open_api
        self._publish = publish
        self._is_lost = is_lost
        self._now_s = now_s
        self._selector = ""
        self._trust = Trust()
        self._pods = kube_pods.PodTable()
        self._gone: set[str] = set()
        """Uids of pods that are leaving and whose engine has ended already."""
        self._noted: set[str] = set()
        """Uids of pods that the log has named as not ours."""
        self._published: Sequence[FoundEngine] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Of a refresh that is to come."""
        self._has_fleet = asyncio.Event()
        self._to_verify = asyncio.Event()
        self._follow_limit: asyncio.Timeout | None = None
        self._watching_since_s = math.inf
        self.has_listed = False
        """Whether the pods have been listed once."""
        self.error: str | None = None
        """Why the API does not answer now."""

    @property
    def has_verified(self) -> bool:
        """Whether every pod that is known has been looked up, however that ended."""
        return self.has_listed and not self._trust.has_unseen

    def set_fleet(self, fleet: Fleet) -> None:
        """Whose pods are engines, from now on."""
        self._trust.set_fleet(fleet)
        selector = _selector(fleet)
        if selector != self._selector:
            self._selector = selector
            if self._follow_limit is not None:
                # Ends the watch of other services' pods; the next list begins at once.
                self._follow_limit.reschedule(asyncio.get_running_loop().time())
        self._has_fleet.set()
        self._refresh()

    async def run(self) -> None:
        """Never returns; cancel it."""
        await self._has_fleet.wait()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow())
                tasks.create_task(self._verify())
                tasks.create_task(self._sweep())
        finally:
            self._cancel_timer()

    # Following the pods

    async def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._watching_since_s = math.inf
            try:
                async with asyncio.timeout(None) as limit, self._open_api() as api:
                    self._follow_limit = limit
                    await self._watch(api, await self._list(api))
            except TimeoutError:
                continue
            except KubeError as error:
                reason = str(error)
            except Exception as error:
                # A defect here must not end discovery while the router goes on.
                log.exception("following pods failed")
                reason = repr(error)
            finally:
                self._follow_limit = None
            if self._now_s() - self._watching_since_s > _STEADY_S:
                # A watch that was cut, or whose version has become too old: nothing is wrong yet.
                pause_s = _FIRST_PAUSE_S
            else:
                self._note_failure(reason)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _list(self, api: KubeApi) -> str:
        pods = await api.list_pods(self._namespace, self._selector)
        self.has_listed = True
        self._pods.replace(pods.items)
        self._refresh()
        return pods.metadata.resource_version

    async def _watch(self, api: KubeApi, version: str) -> None:
        """From one watch to the next, until one fails. Raises KubeError."""
        while True:
            before, started_s = version, self._now_s()
            async with api.watching_pods(
                self._namespace, self._selector, version, random.randint(*_WATCH_S)
            ) as events:
                self._note_success()
                async for event in events:
                    version = self._apply(event)
            if version == before and self._now_s() - started_s < _STEADY_S:
                raise KubeError("the API ended a watch at once")

    def _apply(self, event: WatchEvent) -> str:
        """Returns the version that the event brings."""
        if event.type == "BOOKMARK":
            return msgspec.json.decode(event.object, type=AnyObject).metadata.resource_version
        pod = msgspec.json.decode(event.object, type=Pod)
        is_news = self._pods.remove(pod) if event.type == "DELETED" else self._pods.put(pod)
        if is_news and self._timer is None:
            # What comes in a burst is published together: it costs some 10 us per pod each time.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_COALESCE_S, self._refresh)
        return pod.metadata.resource_version

    def _note_success(self) -> None:
        self._watching_since_s = min(self._watching_since_s, self._now_s())
        if self.error is not None:
            log.info("Kubernetes API answers again", extra={"namespace": self._namespace})
        self.error = None

    def _note_failure(self, reason: str) -> None:
        if self.error is None:
            log.warning(
                "Kubernetes API fails, engines stay as they were known",
                extra={"namespace": self._namespace, "reason": reason},
            )
        self.error = reason

    # Whose pods they are

    async def _verify(self) -> None:
        while True:
            self._to_verify.clear()
            due_s = self._trust.next_due_s()
            pause_s = None if due_s is None else max(0.0, due_s - self._now_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._to_verify.wait()
            await self._look_up()

    async def _look_up(self) -> None:
        due = self._trust.due(self._now_s())
        if not due:
            return
        try:
            async with self._open_api() as api:
                for controller in due:
                    await self._look_up_one(api, controller)
        except KubeError as error:
            for controller in due:
                self._note_lookup_failure(controller, str(error))
        except Exception as error:
            log.exception("looking up owners failed")
            for controller in due:
                self._note_lookup_failure(controller, repr(error))
        self._refresh()

    async def _look_up_one(self, api: KubeApi, controller: OwnerReference) -> None:
        try:
            uid = await kube_owners.service_uid(api, self._namespace, controller)
        except KubeError as error:
            self._note_lookup_failure(controller, str(error))
        else:
            self._trust.on_found(controller, uid, self._now_s())

    def _note_lookup_failure(self, controller: OwnerReference, reason: str) -> None:
        if self._trust.on_failed(controller, self._now_s()):
            log.warning(
                "owner cannot be looked up, its pods get nothing",
                extra={"kind": controller.kind, "owner": controller.name, "reason": reason},
            )

    # What comes of it

    def _refresh(self) -> None:
        """Publish what is known now, when it differs from what was published last."""
        self._cancel_timer()
        self._trust.keep_only(
            controller
            for pod in self._pods.by_uid.values()
            if (controller := pod.metadata.controller) is not None
            and kube_owners.may_lead_to_service(controller)
        )
        self._gone &= self._pods.by_uid.keys()
        self._noted &= self._pods.by_uid.keys()
        if self._trust.next_due_s() is not None:
            self._to_verify.set()
        if not self.has_listed:
            return
        engines = self._engines()
        if engines != self._published:
            self._published = engines
            self._publish(engines)

    def _engines(self) -> list[FoundEngine]:
        trusted = []
        for pod in self._pods.by_uid.values():
            if pod.metadata.uid in self._gone:
                continue
            if self._trust.service_of(pod.metadata.controller) is not None:
                trusted.append(pod)
            else:
                self._note_stranger(pod)
        engines = []
        for pod in self._pods.holders(trusted):
            service = self._trust.service_of(pod.metadata.controller)
            assert service is not None
            engines.append(kube_pods.found_engine(pod, service))
        return engines

    def _note_stranger(self, pod: Pod) -> None:
        controller = pod.metadata.controller
        if controller is not None and kube_owners.may_lead_to_service(controller):
            if not self._trust.is_refused(controller):
                return  # it has yet to be looked up
            reason = f"{controller.kind} {controller.name} belongs to no service of this router"
        else:
            reason = "no workload of a service controls it"
        if pod.metadata.uid not in self._noted:
            self._noted.add(pod.metadata.uid)
            log.warning(
                "pod gets nothing, it is none of ours",
                extra={"pod": pod.metadata.name, "reason": reason},
            )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _sweep(self) -> None:
        """A leaving pod whose telemetry has broken off is gone, whenever the API says so."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            ended = {
                engine.origin.pod_uid
                for engine in self._published or ()
                if engine.is_draining and self._is_lost(engine.address.http)
            }
            if ended:
                self._gone |= ended
                self._refresh()


def _selector(fleet: Fleet) -> str:
    """Labels only spare the API and this router other services' pods: they are not trusted."""
    selector = f"{COMPONENT_LABEL}={ENGINE_COMPONENT}"
    names = sorted(service.name for service in fleet.services)
    if 0 < len(names) <= _MAX_NAMED_SERVICES:
        selector += f",{SERVICE_LABEL} in ({','.join(names)})"
    return selector
