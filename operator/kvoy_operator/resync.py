"""Compares the store with the API server: what watches have missed is found and fetched.

A list after a cut does not tell which objects are gone, and a watch can die in silence. So at the
start of leading, before anything is decided, and every few minutes from then on, names, uids and
versions of all objects are listed, without their contents, and differences that a watch does not
clear up in a few seconds are read one by one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvoy_operator.api import PARTIAL_LIST, Api
from kvoy_operator.api_errors import ApiFailure, ApiRefusal
from kvoy_operator.handlers import OnGone, OnPut
from kvoy_operator.kinds import Kind
from kvoy_operator.record import Ref, record_of
from kvoy_operator.store import Store

log = logging.getLogger(__name__)

_CHUNK_SIZE = "500"
_LOOK_AGAIN_S = 0.2
_NUM_TRIES = 5
"""Of one page."""
_RETRY_S = 0.5


class _Metadata(msgspec.Struct):
    name: str
    uid: str
    resourceVersion: str
    namespace: str = ""


class _Item(msgspec.Struct):
    metadata: _Metadata


class _ListMetadata(msgspec.Struct):
    resourceVersion: str
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct):
    metadata: _ListMetadata
    items: list[_Item] | None = None


@dataclass(frozen=True, slots=True)
class _Listing:
    """Which objects of a kind exist, at one version of the whole collection."""

    kind: Kind
    namespace: str | None
    """None: of all namespaces."""
    version: int
    objects: dict[Ref, tuple[str, int]]
    """uid and version."""


class Resync:
    def __init__(
        self,
        api: Api,
        store: Store,
        namespaces: Sequence[str],
        kinds: Callable[[], Sequence[Kind]],
        on_put: OnPut,
        on_gone: OnGone,
        on_missed: Callable[[Collection[Kind]], object] = lambda _: None,
    ) -> None:
        """`kinds` says what is watched at present; no `namespaces` means all. `on_missed` is told
        of kinds whose watch has left something out."""
        self._api = api
        self._store = store
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._kinds = kinds
        self._on_put = on_put
        self._on_gone = on_gone
        self._on_missed = on_missed

    async def run_once(self, kinds: Sequence[Kind] | None = None, patience_s: float = 10.0) -> int:
        """Make the store complete; how many objects the watches had not brought, having been silent
        for `patience_s`: a first list of thousands takes longer than that, and goes on.

        `kinds`: only those; without, all that are watched.

        Raises ApiFailure: then nothing is known about the store.
        """
        listings = [
            await self._list(kind, namespace)
            for kind in (self._kinds() if kinds is None else kinds)
            for namespace in self._namespaces
        ]
        late = await self._wait(listings, patience_s)
        for kind, ref in late:
            await self._fetch(kind, ref)
        if late:
            log.warning("watches missed objects", extra={"num_objects": len(late)})
            self._on_missed({kind for kind, _ in late})
        return len(late)

    async def _wait(self, listings: list[_Listing], patience_s: float) -> list[tuple[Kind, Ref]]:
        """Give watches time to bring what differs; what still does when they bring nothing more."""
        loop = asyncio.get_running_loop()
        fewest, deadline_s = math.inf, 0.0
        while True:
            differing = [(each.kind, ref) for each in listings for ref in self._differing(each)]
            if len(differing) < fewest:
                fewest, deadline_s = len(differing), loop.time() + patience_s
            if not differing or loop.time() >= deadline_s:
                return differing
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _differing(self, listing: _Listing) -> list[Ref]:
        differing = []
        for ref, (uid, version) in listing.objects.items():
            record = self._store.record(ref)
            # A record of another uid and a newer version has replaced what was listed.
            if not self._store.is_gone(uid) and (record is None or record.version < version):
                differing.append(ref)
        for record in self._store.records(listing.kind.name):
            is_listed = record.ref in listing.objects
            in_scope = listing.namespace in (None, record.ref.namespace)
            if not is_listed and in_scope and record.version <= listing.version:
                differing.append(record.ref)
        return differing

    async def _list(self, kind: Kind, namespace: str | None) -> _Listing:
        params = {"limit": _CHUNK_SIZE}
        if kind.label_selector:
            params["labelSelector"] = kind.label_selector
        objects: dict[Ref, tuple[str, int]] = {}
        while True:
            raw = await self._ask(kind, namespace, params)
            page = msgspec.json.decode(raw, type=_List)
            for item in page.items or ():
                seen = item.metadata
                ref = Ref(kind.name, seen.namespace, seen.name)
                objects[ref] = (seen.uid, int(seen.resourceVersion))
            if not page.metadata.continue_:
                return _Listing(kind, namespace, int(page.metadata.resourceVersion), objects)
            params["continue"] = page.metadata.continue_

    async def _ask(self, kind: Kind, namespace: str | None, params: Mapping[str, str]) -> bytes:
        """One page. A server that refuses now and then must not make all lists begin anew."""
        path = kind.path(namespace)
        for _ in range(_NUM_TRIES - 1):
            try:
                return await self._api.raw("GET", path, params=params, accept=PARTIAL_LIST)
            except ApiFailure as error:
                if isinstance(error, ApiRefusal) and not error.is_temporary:
                    raise
                await asyncio.sleep(error.retry_after_s or _RETRY_S)
        return await self._api.raw("GET", path, params=params, accept=PARTIAL_LIST)

    async def _fetch(self, kind: Kind, ref: Ref) -> None:
        try:
            body = await self._api.request("GET", kind.path(ref.namespace, ref.name))
        except ApiRefusal as error:
            if not error.is_not_found:
                raise
            record = self._store.record(ref)
            if record is not None:
                self._on_gone(ref, record.uid)
            return
        self._on_put(record_of(kind, body))
