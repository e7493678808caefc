"""All that the operator knows of the cluster: the newest record of every watched object.

Fed by watches, by answers to the operator's own writes and by resyncs, in any order: an object
never goes back to an older version, so a decision never sees less than what it has itself written.
Owned by one event loop; knows neither kopf nor HTTP.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvoy_operator.kinds import LLM_ROUTER, LLM_SERVICE
from kvoy_operator.observed import ChildKey, Observed, PodView, WorkloadView
from kvoy_operator.own_write import Write, has_news
from kvoy_operator.record import Key, Record, Ref

_MAX_TOMBSTONES = 10_000
"""Enough for whatever may be on its way in watches when objects have gone."""


class Store:
    def __init__(self) -> None:
        self._records: dict[Ref, Record] = {}
        self._by_key: dict[Key, set[Ref]] = {}
        self._customs: dict[tuple[str, str], set[Key]] = {}  # of (kind, namespace)
        self._tombstones: OrderedDict[str, None] = OrderedDict()  # uids of objects that are gone
        self.has_lws = False
        """Whether the cluster knows LeaderWorkerSets."""

    def __len__(self) -> int:
        return len(self._records)

    def put(self, record: Record) -> set[Key]:
        """Take in an object; the keys for which something has changed."""
        previous = self._records.get(record.ref)
        if record.uid in self._tombstones:
            return set()
        if previous is not None and record.version <= previous.version:
            return set()
        if previous is not None:
            self._unlink(previous)
            if previous.uid != record.uid:
                self._bury(previous.uid)
        self._records[record.ref] = record
        self._link(record)
        return self._concerned(record, previous)

    def put_own(self, record: Record, write: Write) -> set[Key]:
        """Take in the answer to an own write: whoever has made it need not look at what it has
        done itself, but at what somebody else has done in the same moment."""
        previous = self._records.get(record.ref)
        keys = self.put(record)
        return keys if has_news(previous, record, write) else keys - set(record.keys)

    def remove(self, ref: Ref, uid: str) -> set[Key]:
        """Forget an object that is gone; the keys for which something has changed."""
        self._bury(uid)
        record = self._records.get(ref)
        if record is None or record.uid != uid:
            return set()
        del self._records[ref]
        self._unlink(record)
        return self._concerned(record, None)

    def all_keys(self) -> list[Key]:
        """Everything to reconcile."""
        return [key for keys in self._customs.values() for key in keys]

    def custom(self, key: Key) -> dict[str, Any] | None:
        """The custom resource itself; None: there is none."""
        return self.body(Ref(*key))

    def customs(self, kind: str, namespace: str) -> list[dict[str, Any]]:
        """All custom resources of a kind in a namespace, by name."""
        keys = sorted(self._customs.get((kind, namespace), ()))
        return [body for key in keys if (body := self.custom(key)) is not None]

    def body(self, ref: Ref) -> dict[str, Any] | None:
        record = self._records.get(ref)
        return None if record is None else record.body()

    def record(self, ref: Ref) -> Record | None:
        return self._records.get(ref)

    def observed(self, key: Key) -> Observed:
        """What belongs to a service or router, at this moment."""
        children: dict[ChildKey, Mapping[str, Any]] = {}
        workloads: list[WorkloadView] = []
        pods: list[PodView] = []
        for ref in sorted(self._by_key.get(key, ())):
            record = self._records[ref]
            if isinstance(record.view, PodView):
                pods.append(record.view)
                continue
            if isinstance(record.view, WorkloadView):
                workloads.append(record.view)
            if ref.kind not in (LLM_SERVICE.name, LLM_ROUTER.name):
                children[ChildKey(ref.kind, ref.name)] = record.body()
        return Observed(children, tuple(workloads), tuple(pods), self.has_lws)

    def is_gone(self, uid: str) -> bool:
        """Whether the object is known to exist no more."""
        return uid in self._tombstones

    def records(self, kind: str) -> Iterator[Record]:
        return (record for ref, record in list(self._records.items()) if ref.kind == kind)

    def forget_kind(self, kind: str) -> set[Key]:
        """Drop all objects of a kind that the cluster no longer knows."""
        concerned: set[Key] = set()
        for record in self.records(kind):
            concerned |= self.remove(record.ref, record.uid)
        return concerned

    def _link(self, record: Record) -> None:
        for key in record.keys:
            self._by_key.setdefault(key, set()).add(record.ref)
        if record.ref.kind in (LLM_SERVICE.name, LLM_ROUTER.name):
            where = (record.ref.kind, record.ref.namespace)
            self._customs.setdefault(where, set()).add(Key(*record.ref))

    def _unlink(self, record: Record) -> None:
        for key in record.keys:
            _discard(self._by_key, key, record.ref)
        if record.ref.kind in (LLM_SERVICE.name, LLM_ROUTER.name):
            _discard(self._customs, record.ref[:2], Key(*record.ref))

    def _bury(self, uid: str) -> None:
        self._tombstones[uid] = None
        while len(self._tombstones) > _MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _concerned(self, record: Record, previous: Record | None) -> set[Key]:
        keys = set(record.keys)
        if previous is not None:
            keys |= set(previous.keys)
        if record.ref.kind == LLM_SERVICE.name:
            keys.update(self._routers_over(record, previous))
        elif record.ref.kind == LLM_ROUTER.name:
            keys.update(self._services_behind(record.ref))
        return keys

    def _routers_over(self, record: Record, previous: Record | None) -> Collection[Key]:
        """Shared routers that may have to take a service in or leave it out."""
        routers = self._customs.get((LLM_ROUTER.name, record.ref.namespace), set())
        if not routers or (previous is not None and _as_member(record) == _as_member(previous)):
            return ()
        return routers

    def _services_behind(self, router: Ref) -> Collection[Key]:
        """Services that refer to a router: its readiness is theirs."""
        services = self._customs.get((LLM_SERVICE.name, router.namespace), set())
        return [key for key in services if _router_ref(self.custom(key) or {}) == router.name]


def _discard(sets: dict[Any, set[Any]], key: Any, member: Any) -> None:
    members = sets.get(key)
    if members is not None:
        members.discard(member)
        if not members:
            del sets[key]


def _as_member(record: Record) -> tuple[Any, ...]:
    """What a shared router sees of a service."""
    body = record.body()
    metadata, conditions = body["metadata"], (body.get("status") or {}).get("conditions") or ()
    accepted = [c.get("status") for c in conditions if c.get("type") == "Accepted"]
    return (
        record.uid,
        metadata.get("generation"),
        metadata.get("labels"),
        metadata.get("deletionTimestamp"),
        accepted,
    )


def _router_ref(service: Mapping[str, Any]) -> str | None:
    router = (service.get("spec") or {}).get("router") or {}
    ref: str | None = router.get("ref")
    return ref
