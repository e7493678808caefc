"""One pool in one revision: a Deployment, or a LeaderWorkerSet for groups of pods. Pure.

Written once, when it is created, and never rendered again: so neither an operator's upgrade nor a
new default changes a pod that serves. The number of replicas is not part of it; who owns that
number, the caller knows.
"""

from __future__ import annotations

import math
from typing import Final

from kvoy_contract.names import ENGINE_COMPONENT
from kvoy_operator.identity import Manifest, child, child_labels, engine_selector, workload_name
from kvoy_operator.manifests.engine import engine_template, model_annotations
from kvoy_operator.options import RenderOptions
from kvoy_operator.resources import LLMService

EXCLUSIVE_TOPOLOGY_ANNOTATION: Final = "leaderworkerset.sigs.k8s.io/exclusive-topology"


def render_workload(
    service: LLMService, pool: str, revision: str, options: RenderOptions
) -> Manifest:
    """The pool's workload without `spec.replicas`.

    Raises InvalidSpec when a `podTemplate` of the spec is no patch of a pod.
    """
    is_group = service.spec.pools[pool].nodes > 1
    workload = child(
        service,
        "leaderworkerset.x-k8s.io/v1" if is_group else "apps/v1",
        "LeaderWorkerSet" if is_group else "Deployment",
        workload_name(service.name, pool, revision),
        child_labels(service, ENGINE_COMPONENT, pool, revision),
        model_annotations(service),
    )
    if not is_group:
        return workload | {"spec": _deployment_spec(service, pool, revision, options)}
    topology_key = service.spec.pools[pool].topology_key
    if topology_key is not None:
        workload["metadata"]["annotations"][EXCLUSIVE_TOPOLOGY_ANNOTATION] = topology_key
    return workload | {"spec": _group_spec(service, pool, revision, options)}


def _deployment_spec(
    service: LLMService, pool: str, revision: str, options: RenderOptions
) -> Manifest:
    return {
        "selector": {"matchLabels": engine_selector(service.name, pool, revision)},
        # Counts from the last pod that became ready: loading must fit into it.
        "progressDeadlineSeconds": math.ceil(service.spec.progress_deadline_s),
        "revisionHistoryLimit": 2,
        # For a restart by hand: a GPU is given back before it is asked for again.
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "template": engine_template(service, pool, revision, options),
    }


def _group_spec(service: LLMService, pool: str, revision: str, options: RenderOptions) -> Manifest:
    leader = engine_template(service, pool, revision, options)
    worker = engine_template(service, pool, revision, options, is_worker=True)
    return {
        "leaderWorkerTemplate": {
            "size": service.spec.pools[pool].nodes,
            # Half a group computes nothing: when one pod goes, all start again.
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": leader,
            "workerTemplate": worker,
        },
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
        },
    }
