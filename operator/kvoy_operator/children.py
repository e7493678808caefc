"""Makes a service's or router's children what they should be: creates, repairs, adopts, prunes.

Knows kinds and owners, not what the children are for. What the API server refuses for good is
returned, so that the rest is still applied; what may pass is raised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvoy_operator.acceptance import Refusal, name_clash
from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.cluster import Cluster
from kvoy_operator.compare import is_applied, stamped
from kvoy_operator.identity import (
    Manifest,
    fleet_secret_name,
    router_name,
)
from kvoy_operator.kinds import DEPLOYMENT, JOB, SECRET, kind_of
from kvoy_operator.observed import Body, ChildKey, Observed, child_key
from kvoy_operator.ownership import Ownership, ownership
from kvoy_operator.refusals import recheck_after_s, refusal_by
from kvoy_operator.secret_mark import SecretMark
from kvoy_operator.together import together

_RECHECK_S = 2.0
"""So long until another look at objects that are going away."""
_PRUNED = frozenset(
    {
        "Deployment",
        "Job",
        "LLMRoleScaler",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "RoleBinding",
        "Service",
        "ServiceAccount",
    }
)
"""Deleted when they are no longer rendered. A claim holds data and stays until its owner goes."""
_FIRST = frozenset({"PersistentVolumeClaim", "RoleBinding", "Secret", "ServiceAccount"})
"""What pods need from their first second on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    refusals: tuple[Refusal, ...] = ()
    """What the API server will not have, in words for the status."""
    requeue_after_s: float | None = None
    """Something goes away first."""


class Children:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def settle(
        self, owner: Body, wanted: Iterable[Manifest], observed: Observed, kept: Iterable[ChildKey]
    ) -> Outcome:
        """Make children what `wanted` says, and delete others except `kept`.

        Raises ApiFailure for what may pass.
        """
        manifests = list(wanted)
        mark = SecretMark.of(owner, manifests)
        has_secrets = mark.is_borne(owner, observed)
        first = [
            each
            for each in manifests
            if each["kind"] in _FIRST and not (has_secrets and each["kind"] == SECRET.name)
        ]
        found = await self._settle_wave(owner, first, observed)
        if all(
            result is Ownership.OURS
            for each, result in zip(first, found, strict=True)
            if each["kind"] == SECRET.name
        ):
            manifests = mark.put_on(manifests)
        rest = [each for each in manifests if each["kind"] not in _FIRST]
        found += await self._settle_wave(owner, rest, observed)
        await self._prune(owner, {*map(child_key, manifests), *kept}, observed)
        refusals = tuple(each for each in found if isinstance(each, Refusal))
        if Ownership.DYING in found:
            return Outcome(refusals, _RECHECK_S)
        rechecks_s = [after_s for each in refusals if (after_s := recheck_after_s(each))]
        return Outcome(refusals, min(rechecks_s, default=None))

    async def _settle_wave(
        self, owner: Body, manifests: Iterable[Manifest], observed: Observed
    ) -> list[Refusal | Ownership]:
        tries = (self._try_one(owner, stamped(each), observed) for each in manifests)
        return await together(*tries)

    async def _prune(self, owner: Body, wanted: Collection[ChildKey], observed: Observed) -> None:
        """Delete what is no longer rendered. That there may be a Secret for a router is known from
        the router's Deployment, so the Secret goes first."""
        pruned = [
            live
            for key, live in observed.children.items()
            if key not in wanted and _is_prunable(key, live, owner)
        ]
        name = owner["metadata"]["name"]
        has_router = any(child_key(live) == (DEPLOYMENT.name, router_name(name)) for live in pruned)
        if has_router and (SECRET.name, fleet_secret_name(name)) not in wanted:
            await self._delete_secret(owner, fleet_secret_name(name))
        await together(*(self.delete(live) for live in pruned))

    async def _delete_secret(self, owner: Body, name: str) -> None:
        namespace = owner["metadata"]["namespace"]
        live = await self._cluster.glimpse(SECRET, namespace, name)
        if live is not None and ownership(live, owner) is Ownership.OURS:
            await self._cluster.delete(SECRET, namespace, name, live["metadata"]["uid"])

    async def find(self, owner: Body, manifest: Body) -> Body | None:
        """A live object of the wanted name that no watch has shown: a stranger's, or ours so new
        that it is not there yet, or ours without its labels."""
        metadata = manifest["metadata"]
        kind = kind_of(manifest["kind"])
        live = await self._cluster.read(kind, metadata["namespace"], metadata["name"])
        return None if live is None else {"kind": kind.name, **live}

    async def delete(self, live: Body) -> None:
        metadata = live["metadata"]
        await self._cluster.delete(
            kind_of(live["kind"]), metadata["namespace"], metadata["name"], metadata["uid"]
        )

    async def _try_one(
        self, owner: Body, manifest: Manifest, observed: Observed
    ) -> Refusal | Ownership:
        try:
            return await self._settle_one(owner, manifest, observed)
        except ApiRefusal as error:
            refusal = refusal_by(error, manifest)
            if refusal is None:
                raise
            return refusal

    async def _settle_one(
        self, owner: Body, manifest: Manifest, observed: Observed
    ) -> Refusal | Ownership:
        if manifest["kind"] == SECRET.name:
            return await self._settle_secret(owner, manifest, is_new=not observed.children)
        live = observed.children.get(child_key(manifest))
        if live is None:
            if await self._cluster.create(manifest):
                return Ownership.OURS
            live = await self.find(owner, manifest)
        if live is None:
            raise ApiRefusal(409, "Conflict", "what was in the way has gone")
        whose = ownership(live, owner)
        if whose is Ownership.STRANGER:
            return name_clash(manifest, live)
        if whose is Ownership.DYING or "deletionTimestamp" in live["metadata"]:
            return Ownership.DYING
        if manifest["kind"] == JOB.name:
            # Its template can never change, and its name changes with what it does.
            if whose is Ownership.ORPHAN:
                await adopt(self._cluster, manifest, live)
        elif not is_applied(manifest, live):
            await self._cluster.apply(manifest)
        return Ownership.OURS

    async def _settle_secret(
        self, owner: Body, manifest: Manifest, *, is_new: bool
    ) -> Refusal | Ownership:
        """`is_new`: its owner has no children yet, so it is most likely not there."""
        if is_new and await self._cluster.create(manifest):
            return Ownership.OURS
        metadata = manifest["metadata"]
        live = await self._cluster.glimpse(SECRET, metadata["namespace"], metadata["name"])
        whose = Ownership.OURS if live is None else ownership(live, owner)
        if live is not None and whose is Ownership.STRANGER:
            return name_clash(manifest, live)
        if live is not None and (
            whose is Ownership.DYING or "deletionTimestamp" in live["metadata"]
        ):
            return Ownership.DYING
        # One that somebody has made meanwhile is not taken from him; the next try sees it.
        await self._cluster.apply(manifest, force=live is not None)
        return Ownership.OURS


async def adopt(cluster: Cluster, manifest: Body, live: Body) -> None:
    """Take over an object without touching its spec."""
    metadata = manifest["metadata"]
    await cluster.merge_metadata(
        live,
        {"ownerReferences": metadata["ownerReferences"], "labels": metadata["labels"]},
    )


def _is_prunable(key: ChildKey, live: Body, owner: Body) -> bool:
    is_going = "deletionTimestamp" in live["metadata"]
    return key.kind in _PRUNED and not is_going and ownership(live, owner) is Ownership.OURS
