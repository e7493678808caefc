"""What the operator does to the cluster: apply, scale, adopt, delete, report. The only writes, but
for Events and the Lease.

Every answer goes into the store at once, so the next decision sees the operator's own writes
whether or not a watch has brought them, and what others have written in the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvoy_operator.api import APPLY_PATCH, MERGE_PATCH, PARTIAL_OBJECT, Api
from kvoy_operator.api_errors import ApiRefusal, ApiUnreachable
from kvoy_operator.kinds import EVENT, SECRET, Kind, kind_of
from kvoy_operator.observed import Body
from kvoy_operator.own_write import Write
from kvoy_operator.record import Record, Ref, record_of
from kvoy_operator.scaling import FIELD_MANAGER, SCALE_MANAGER

STATUS_MANAGER = "kvoy-operator-status"
_MAX_EVENTS = 100
"""The same news about the same object is one Event: there are few."""
_NO_VERSION = "1"
"""No object has it, since every write makes a later one: what is applied with it is created, or
conflicts with what is there."""


class Cluster:
    def __init__(
        self,
        api: Api,
        on_put: Callable[[Record, Write], object],
        on_gone: Callable[[Ref, str], object],
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """`on_put` and `on_gone` are the store's `put_own` and `remove`. Nothing is written where
        `may_act` says no: that is an ApiUnreachable."""
        self._api = api
        self._on_put = on_put
        self._on_gone = on_gone
        self._may_act = may_act

    async def read(self, kind: Kind, namespace: str, name: str) -> Body | None:
        """The object as the server has it now; None: there is none."""
        try:
            body: Body = await self._api.request("GET", kind.path(namespace, name))
        except ApiRefusal as error:
            if error.is_not_found:
                return None
            raise
        return body

    async def glimpse(self, kind: Kind, namespace: str, name: str) -> Body | None:
        """The metadata of an object that may be changed but not read: what a change of nothing
        would give. None: there is none."""
        try:
            answer = await self._api.raw(
                "PATCH",
                kind.path(namespace, name),
                params={"fieldManager": FIELD_MANAGER, "dryRun": "All"},
                body={},
                content_type=MERGE_PATCH,
                accept=PARTIAL_OBJECT,
            )
        except ApiRefusal as error:
            if error.is_not_found:
                return None
            raise
        body: Body = msgspec.json.decode(answer)
        return body

    async def warnings(self, namespace: str, kind: str, name: str) -> list[Body]:
        """Events that warn of an object."""
        about = f"type=Warning,regarding.kind={kind},regarding.name={name}"
        params = {"fieldSelector": about, "limit": str(_MAX_EVENTS)}
        answer = await self._api.request("GET", EVENT.path(namespace), params=params)
        return answer.get("items") or []

    async def create(self, manifest: Body, *, is_dry: bool = False) -> bool:
        """Server-side apply of an object that is not there yet; False: there is one, untouched.

        With `is_dry` the server only judges it. Raises ApiRefusal with the server's words.
        """
        metadata = {**manifest["metadata"], "resourceVersion": _NO_VERSION}
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        if is_dry:
            params["dryRun"] = "All"
        try:
            write = None if is_dry else Write.CREATE
            await self._apply({**manifest, "metadata": metadata}, params, write)
        except ApiRefusal as error:
            if error.is_conflict:
                return False
            raise
        return True

    async def apply(self, manifest: Body, *, force: bool = True) -> None:
        """Server-side apply: by `force`, what is rendered is taken from whoever has changed it."""
        params = {"fieldManager": FIELD_MANAGER, "force": str(force).lower()}
        await self._apply(manifest, params, Write.CONTENT)

    async def check(self, manifest: Body) -> None:
        """Have the server judge the object without making it. Raises ApiRefusal with its words."""
        await self._apply(
            manifest,
            {"fieldManager": FIELD_MANAGER, "force": "true", "dryRun": "All"},
            None,
        )

    async def scale(self, kind: Kind, namespace: str, name: str, uid: str, replicas: int) -> None:
        """Set a workload's `spec.replicas`. Raises ApiRefusal when it is not the one with `uid`."""
        manifest = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "spec": {"replicas": replicas},
        }
        params = {"fieldManager": SCALE_MANAGER, "force": "true"}
        await self._apply(manifest, params, Write.REPLICAS)

    async def merge_metadata(self, live: Body, metadata: Mapping[str, Any]) -> None:
        """Change labels or owners of an object and leave all else, its pod template above all."""
        kind, seen = kind_of(live["kind"]), live["metadata"]
        change = {"metadata": {**metadata, "uid": seen["uid"]}}
        self._check_may_act()
        self.take_in(
            kind,
            await self._api.request(
                "PATCH",
                kind.path(seen["namespace"], seen["name"]),
                params={"fieldManager": FIELD_MANAGER},
                body=change,
                content_type=MERGE_PATCH,
            ),
            Write.OWNERS,
        )

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this uid, and let the server delete what it owns."""
        options = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        self._check_may_act()
        try:
            answer = await self._api.request("DELETE", kind.path(namespace, name), body=options)
        except ApiRefusal as error:
            # Gone, or another object of that name by now.
            if not (error.is_not_found or error.is_conflict):
                raise
            answer = {"kind": "Status"}
        if answer.get("kind") == "Status":
            self._on_gone(Ref(kind.name, namespace, name), uid)
        elif kind != SECRET:
            self.take_in(kind, answer, Write.DELETION)

    async def patch_status(self, body: Body, status: Mapping[str, Any]) -> None:
        """Replace the status of the custom resource `body`, if it is still the same object."""
        kind, metadata = kind_of(body["kind"]), body["metadata"]
        manifest = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "status": status,
        }
        self._check_may_act()
        self.take_in(
            kind,
            await self._api.request(
                "PATCH",
                kind.path(metadata["namespace"], metadata["name"], "status"),
                params={"fieldManager": STATUS_MANAGER, "force": "true"},
                body=manifest,
                content_type=APPLY_PATCH,
            ),
            Write.STATUS,
        )

    async def _apply(self, manifest: Body, params: Mapping[str, str], write: Write | None) -> None:
        """`write`: what it may change; None: nothing, it is a dry run."""
        kind, metadata = kind_of(manifest["kind"]), manifest["metadata"]
        self._check_may_act()
        answer = await self._api.raw(
            "PATCH",
            kind.path(metadata["namespace"], metadata["name"]),
            params=params,
            body=manifest,
            content_type=APPLY_PATCH,
        )
        if write is not None and kind != SECRET:
            self.take_in(kind, msgspec.json.decode(answer), write)

    def take_in(self, kind: Kind, body: Body, write: Write) -> None:
        """Let the store have an object as the server has just given it after a `write`."""
        self._on_put(record_of(kind, body), write)

    def _check_may_act(self) -> None:
        """A process that was stopped for a while wakes in the middle of a reconcile."""
        if not self._may_act():
            raise ApiUnreachable("this operator leads no more")
