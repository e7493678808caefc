"""A Kubernetes API that does what a test tells it, in the place of `kube_api.KubeApi`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from kvoy_router.errors import KubeError
from kvoy_router.kube_api import KubeApi
from kvoy_router.kube_objects import (
    ListMeta,
    ObjectMeta,
    OwnerReference,
    Pod,
    PodList,
    WatchEvent,
)


def reference(kind: str, name: str, group: str = "apps/v1", uid: str = "") -> dict[str, Any]:
    """Of a controller."""
    return {
        "apiVersion": group,
        "kind": kind,
        "name": name,
        "uid": uid or f"{name}-uid",
        "controller": True,
    }


RS = reference("ReplicaSet", "rs")
"""Of the Deployment `d` of the service `svc`."""


def meta(name: str, owner: dict[str, Any] | None, uid: str = "") -> ObjectMeta:
    owners = [msgspec.convert(owner, OwnerReference)] if owner else None
    return ObjectMeta(name=name, uid=uid or f"{name}-uid", owner_references=owners)


class FakeApi(KubeApi):
    """A namespace with pods and owners; every watch hears of their changes."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.owners: dict[tuple[str, str], ObjectMeta] = {
            ("ReplicaSet", "rs"): meta("rs", reference("Deployment", "d")),
            ("Deployment", "d"): meta("d", reference("LLMService", "svc", "kvoy.dev/v1alpha1")),
        }
        self.version = 1
        self.is_away = False
        self.refuses_owners = False
        self.num_lists = 0
        self.num_lookups = 0
        self.selectors: list[str] = []
        self.watched_from: list[str] = []
        self._watches: set[asyncio.Queue[WatchEvent | KubeError | None]] = set()

    def put(self, name: str, *, ip: str = "10.0.0.1", owner: Any = RS, **metadata: Any) -> None:
        """Create or change a pod."""
        is_new = name not in self.pods
        self.version += 1
        self.pods[name] = {
            "metadata": {
                "name": name,
                "uid": f"{name}-uid",
                "resourceVersion": str(self.version),
                "ownerReferences": [owner] if owner else None,
                **metadata,
            },
            "status": {"podIP": ip, "phase": "Running"},
        }
        self._tell("ADDED" if is_new else "MODIFIED", self.pods[name])

    def delete(self, name: str) -> None:
        self.version += 1
        pod = self.pods.pop(name)
        pod["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", pod)

    def bookmark(self) -> None:
        self.version += 100
        self._tell("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def end_watches(self, error: KubeError | None = None) -> None:
        for queue in self._watches:
            queue.put_nowait(error)

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def _tell(self, kind: str, value: object) -> None:
        for queue in self._watches:
            queue.put_nowait(WatchEvent(kind, msgspec.Raw(msgspec.json.encode(value))))

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[KubeApi]:
        yield self

    async def list_pods(self, namespace: str, selector: str) -> PodList:
        if self.is_away:
            raise KubeError("connection refused")
        self.num_lists += 1
        self.selectors.append(selector)
        pods = msgspec.convert(list(self.pods.values()), list[Pod])
        return PodList(ListMeta(str(self.version)), pods)

    @contextlib.asynccontextmanager
    async def watching_pods(
        self, namespace: str, selector: str, version: str, timeout_s: int
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        if self.is_away:
            raise KubeError("connection refused")
        assert timeout_s < 300
        self.watched_from.append(version)
        queue: asyncio.Queue[WatchEvent | KubeError | None] = asyncio.Queue()
        self._watches.add(queue)
        try:
            yield self._events(queue)
        finally:
            self._watches.discard(queue)

    async def _events(
        self, queue: asyncio.Queue[WatchEvent | KubeError | None]
    ) -> AsyncIterator[WatchEvent]:
        while (event := await queue.get()) is not None:
            if isinstance(event, KubeError):
                raise event
            yield event

    async def get_owner(self, namespace: str, owner: OwnerReference) -> ObjectMeta | None:
        self.num_lookups += 1
        if self.is_away or self.refuses_owners:
            raise KubeError("forbidden", 403)
        return self.owners.get((owner.kind, owner.name))
