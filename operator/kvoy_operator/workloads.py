"""A service's engine workloads: writes what a rollout step says, and takes orphans over.

A workload is written once, when it is made, and only scaled from then on.
"""

from __future__ import annotations

from collections.abc import Collection

from kvoy_operator.acceptance import Refusal, name_clash
from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.children import Children, adopt
from kvoy_operator.cluster import Cluster
from kvoy_operator.identity import Manifest
from kvoy_operator.kinds import DEPLOYMENT, LEADER_WORKER_SET, kind_of
from kvoy_operator.manifests import render_workload
from kvoy_operator.observed import Body, ChildKey, Observed, WorkloadView
from kvoy_operator.options import RenderOptions
from kvoy_operator.own_write import Write
from kvoy_operator.ownership import Ownership, has_metadata, ownership
from kvoy_operator.refusals import refusal_by
from kvoy_operator.resources import LLMService
from kvoy_operator.rollout import RolloutStep
from kvoy_operator.rollout_state import PoolRevision
from kvoy_operator.together import together


class Workloads:
    def __init__(self, cluster: Cluster, children: Children, options: RenderOptions) -> None:
        self._cluster = cluster
        self._children = children
        self._options = options

    async def take_over(self, body: Body, service: LLMService, observed: Observed) -> None:
        """Make workloads ours again that lost their owner, and give them the service's labels;
        their templates stay as they were written."""
        for view in observed.workloads:
            live = observed.children[ChildKey(view.kind, view.name)]
            whose = ownership(live, body)
            if view.pool not in service.spec.pools or view.is_deleting:
                continue
            if whose not in (Ownership.OURS, Ownership.ORPHAN):
                continue
            manifest = render_workload(service, view.pool, view.revision, self._options)
            if whose is Ownership.ORPHAN or not has_metadata(manifest, live):
                await adopt(self._cluster, manifest, live)

    async def take(
        self, body: Body, service: LLMService, step: RolloutStep, observed: Observed
    ) -> Refusal | None:
        """Write what the step says: all of it, unless the server refuses a new workload."""
        manifests = {key: self._workload(service, key, step) for key in step.create}
        if not _is_judged_when_made(manifests.values(), observed):
            checks = (self._check_new(body, manifest) for manifest in manifests.values())
            refusals = await together(*checks)
            if any(refusals):
                return next(filter(None, refusals))
        present = {PoolRevision(each.pool, each.revision): each for each in observed.workloads}
        scaled = {key: count for key, count in step.replicas.items() if key in present}
        shrunk = {key: count for key, count in scaled.items() if count < present[key].replicas}
        grown = {key: count for key, count in scaled.items() if count > present[key].replicas}
        # In this order: room is made first, and what is gone was replaced before.
        await together(*(self._scale(service, present[key], n) for key, n in shrunk.items()))
        refusals = await together(*(self._create(body, each) for each in manifests.values()))
        await together(*(self._scale(service, present[key], n) for key, n in grown.items()))
        await together(*(self._delete(service, present[key]) for key in step.delete))
        return next(filter(None, refusals), None)

    async def _create(self, body: Body, manifest: Manifest) -> Refusal | None:
        """That a dry run was taken does not say all: what is too large only etcd knows.

        One that has appeared meanwhile is left alone: a template is written once.
        """
        try:
            is_made = await self._cluster.create(manifest)
        except ApiRefusal as error:
            refusal = refusal_by(error, manifest)
            if refusal is None:
                raise
            return refusal
        return None if is_made else await self._take_in(body, manifest)

    def _workload(self, service: LLMService, key: PoolRevision, step: RolloutStep) -> Manifest:
        manifest = render_workload(service, key.pool, key.revision, self._options)
        # Set with the creation: the API server's own default would start a pod at once.
        return manifest | {"spec": manifest["spec"] | {"replicas": step.replicas[key]}}

    async def _check_new(self, body: Body, manifest: Manifest) -> Refusal | None:
        """Whether a workload can be made: its name is free, and the server takes its template."""
        try:
            for judged in _templates(manifest):
                await self._cluster.check(judged)
            is_free = await self._cluster.create(manifest, is_dry=True)
        except ApiRefusal as error:
            refusal = refusal_by(error, manifest)
            if refusal is None:
                raise
            return refusal
        return None if is_free else await self._take_in(body, manifest)

    async def _take_in(self, body: Body, manifest: Manifest) -> Refusal:
        """A stranger's object is a refusal. One that turns out to be ours goes into the store, and
        a conflict is raised, so that the story is told again."""
        live = await self._children.find(body, manifest)
        if live is None:
            raise ApiRefusal(409, "Conflict", "what was in the way has gone")
        if ownership(live, body) is Ownership.STRANGER:
            return name_clash(manifest, live)
        self._cluster.take_in(kind_of(manifest["kind"]), live, Write.NOTHING)
        if ownership(live, body) is Ownership.DYING:
            raise ApiRefusal(409, "Conflict", "the object of an owner that is gone is there")
        await adopt(self._cluster, manifest, live)
        raise ApiRefusal(409, "Conflict", "the object is there already")

    async def _scale(self, service: LLMService, view: WorkloadView, count: int) -> None:
        await self._cluster.scale(kind_of(view.kind), service.namespace, view.name, view.uid, count)

    async def _delete(self, service: LLMService, view: WorkloadView) -> None:
        await self._cluster.delete(kind_of(view.kind), service.namespace, view.name, view.uid)


def _is_judged_when_made(manifests: Collection[Manifest], observed: Observed) -> bool:
    """Whether a dry run beforehand would tell nothing that the creation does not: there are no
    engines yet that a refusal comes too late for, and no second pool that would be left alone."""
    return (
        not observed.workloads
        and len(manifests) == 1
        and not any(_templates(manifest) for manifest in manifests)
    )


def _templates(manifest: Manifest) -> list[Manifest]:
    """What the server judges of a group beside itself: each of its templates inside a Deployment,
    whose pods the server knows in full. A Deployment needs nothing beside itself."""
    if manifest["kind"] != LEADER_WORKER_SET.name:
        return []
    templates = manifest["spec"]["leaderWorkerTemplate"]
    return [
        _as_deployment(manifest, templates[name]) for name in ("leaderTemplate", "workerTemplate")
    ]


def _as_deployment(manifest: Manifest, template: Manifest) -> Manifest:
    selector = {"matchLabels": template["metadata"]["labels"]}
    return manifest | {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.name,
        "spec": {"replicas": 0, "selector": selector, "template": template},
    }
