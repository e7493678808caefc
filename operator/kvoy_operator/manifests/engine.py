"""The pod template of a pool's engines. Pure.

Engines hold no Kubernetes token and meet the PodSecurity level `restricted`, except with a cache on
the node (`hostPath`), which that level forbids. Last of all come the user's own patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvoy_contract.names import ENGINE_COMPONENT, PREFILL_POOL
from kvoy_operator.identity import (
    MODEL_ANNOTATION,
    MODEL_URI_ANNOTATION,
    Manifest,
    child_labels,
    engine_selector,
)
from kvoy_operator.manifests.engine_container import (
    CONTAINER,
    PRE_STOP_S,
    SHM_VOLUME,
    engine_container,
    engine_image,
    pull_policy,
)
from kvoy_operator.manifests.model_source import ModelSource, make_writable, model_source
from kvoy_operator.manifests.parts import (
    references,
    restricted_pod,
    spread_softly,
    tmp_volume,
)
from kvoy_operator.options import RenderOptions
from kvoy_operator.pod_patch import merge_pod_template
from kvoy_operator.resources import LLMService
from kvoy_operator.spec_pool import PoolSpec

_EXIT_MARGIN_S: Final = 25
"""After draining: closing connections, freeing devices, and the clocks' slack."""


def engine_template(
    service: LLMService,
    pool_name: str,
    revision: str,
    options: RenderOptions,
    *,
    is_worker: bool = False,
) -> Manifest:
    """Raises InvalidSpec when a `podTemplate` of the spec is no patch of a pod."""
    template: Manifest = {
        "metadata": {
            "labels": child_labels(service, ENGINE_COMPONENT, pool_name, revision),
            "annotations": model_annotations(service),
        },
        "spec": {
            **_pod_spec(service, pool_name, options, is_worker=is_worker),
            **_placement(service, pool_name, revision),
        },
    }
    for field, patch in engine_patches(service, pool_name):
        template = merge_pod_template(template, patch, container=CONTAINER, field=field)
    return _tolerate_devices(template, service.spec.pools[pool_name])


def _pod_spec(
    service: LLMService, pool_name: str, options: RenderOptions, *, is_worker: bool
) -> Manifest:
    pool, source = service.spec.pools[pool_name], model_source(service)
    grace_s = service.spec.rollout.drain_timeout.whole_seconds + PRE_STOP_S + _EXIT_MARGIN_S
    optional = {
        "initContainers": _preparation(service, pool, source, options),
        "imagePullSecrets": references(service_pull_secrets(service, options)),
        "resourceClaims": _claims(pool),
    }
    return {
        "automountServiceAccountToken": False,
        # Variables of a Service named kvoy would read as settings (KVOY_PORT).
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": restricted_pod(),
        "containers": [engine_container(service, pool_name, source, options, is_worker=is_worker)],
        "volumes": [*source.volumes, _shared_memory(pool), tmp_volume()],
        **{name: value for name, value in optional.items() if value},
    }


def engine_patches(service: LLMService, pool_name: str) -> Iterator[tuple[str, Manifest]]:
    """The user's patches for a pool's pods, in the order of merging; each with its field's path."""
    spec = service.spec
    pool_path = "spec.prefill" if pool_name == PREFILL_POOL else "spec"
    if spec.engine.pod_template:
        yield "spec.engine.podTemplate", spec.engine.pod_template
    if spec.pools[pool_name].pod_template:
        yield f"{pool_path}.podTemplate", spec.pools[pool_name].pod_template or {}


def model_annotations(service: LLMService) -> dict[str, str]:
    """What the labels cannot say: the model's name and place, in full."""
    return {
        MODEL_ANNOTATION: service.model_name,
        MODEL_URI_ANNOTATION: service.spec.model.reference,
    }


def service_pull_secrets(service: LLMService, options: RenderOptions) -> tuple[str, ...]:
    """The operator's, then the service's own: every pod of the service gets them all."""
    own = (secret.name for secret in service.spec.image_pull_secrets)
    return (*options.image_pull_secrets, *own)


def _placement(service: LLMService, pool_name: str, revision: str) -> Manifest:
    """Replicas apart where there is room. The pods of a group belong together: they are left to
    the scheduler, or to `topologyKey`."""
    if service.spec.pools[pool_name].nodes > 1:
        return {}
    selector = engine_selector(service.name, pool_name, revision)
    return {"topologySpreadConstraints": spread_softly(selector)}


def _preparation(
    service: LLMService, pool: PoolSpec, source: ModelSource, options: RenderOptions
) -> list[Manifest]:
    if not source.is_on_node:
        return []
    return [make_writable(engine_image(service, pool, options), pull_policy(service, options))]


def _claims(pool: PoolSpec) -> list[Manifest]:
    return [
        claim.model_dump(by_alias=True, exclude_none=True, exclude={"request"})
        for claim in pool.resource_claims
    ]


def _tolerate_devices(template: Manifest, pool: PoolSpec) -> Manifest:
    """After the patches: one that sets tolerations sets the whole list."""
    if pool.gpus == 0:
        return template
    taint = {"key": pool.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    tolerations = template["spec"].get("tolerations") or []
    if taint in tolerations:
        return template
    return {**template, "spec": {**template["spec"], "tolerations": [*tolerations, taint]}}


def _shared_memory(pool: PoolSpec) -> Manifest:
    """The default of 64 MiB is too small for the processes of one engine to talk."""
    return {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": pool.shm_size}}
