"""A model downloaded once per cluster: the claim that holds it, and the Job that fills it. Pure.

The Job tries until it succeeds, as an engine would: a gated model whose terms get accepted, or a
token that gets repaired, needs no further hand. Engines are created once it is complete; they mount
the claim read-only and ask no hub. A Job is written once, as pod templates of Jobs never change:
whatever of the spec it depends on is part of its name, so that a change makes another Job.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

from kvoy_contract.names import MODEL_CACHE_COMPONENT, SERVING_POOL
from kvoy_operator.identity import Manifest, cache_claim_name, child, child_labels, fetch_job_name
from kvoy_operator.manifests.engine import engine_patches, model_annotations, service_pull_secrets
from kvoy_operator.manifests.engine_container import environment_of, pull_policy
from kvoy_operator.manifests.model_source import (
    MODELS_FOLDER,
    cache_claim,
    cached_model_folder,
    claim_volume,
    hub_environment,
    models_mount,
)
from kvoy_operator.manifests.parts import (
    references,
    restricted_container,
    restricted_pod,
    tmp_mount,
    tmp_volume,
)
from kvoy_operator.observed import ChildKey, Observed
from kvoy_operator.options import RenderOptions
from kvoy_operator.pod_patch import merge_pod_template
from kvoy_operator.resources import LLMService
from kvoy_operator.spec_model import ClaimCache

CONTAINER: Final = "fetch"
_TRIES: Final = 1_000_000
_WORK_FOLDER: Final = f"{MODELS_FOLDER}/.kvoy"
# Parts of an engine's patch that are about its containers and devices, not about where it may run.
_ENGINE_ONLY: Final = ("containers", "initContainers", "ephemeralContainers", "resourceClaims")


def render_model_cache(service: LLMService, options: RenderOptions) -> list[Manifest]:
    """The claim, unless the user has one, and the Job; nothing for models kept otherwise.

    Raises InvalidSpec when a `podTemplate` of the spec is no patch of a pod.
    """
    claim, job_name = cache_claim(service), fetch_job_of(service)
    cache = service.spec.model.cache
    if claim is None or job_name is None or cache is None or cache.pvc is None:
        return []
    claims = [] if cache.pvc.size is None else [_claim(service, cache.pvc)]
    return [*claims, _fetch_job(service, job_name, claim, options)]


def fetch_job_of(service: LLMService) -> str | None:
    """Name of the Job that must be complete before engines can start; None: no Job is needed."""
    claim = cache_claim(service)
    if claim is None:
        return None
    spec = service.spec
    content = {
        "claim": claim,
        "reference": spec.model.reference,
        "token": [dict(variable) for variable in hub_environment(service)],
        "image": spec.engine.image,
        "env": environment_of(spec.engine.env),
        "pullSecrets": [secret.name for secret in spec.image_pull_secrets],
        "patches": [patch for _, patch in engine_patches(service, SERVING_POOL)],
    }
    text = json.dumps(content, sort_keys=True)
    return fetch_job_name(service.name, hashlib.sha256(text.encode()).hexdigest()[:6])


def is_model_cached(service: LLMService, observed: Observed) -> bool:
    """Whether engines of this spec would find their model; True when they fetch it themselves."""
    name = fetch_job_of(service)
    if name is None:
        return True
    job = observed.children.get(ChildKey("Job", name), {})
    conditions = job.get("status", {}).get("conditions") or ()
    return any(
        condition["type"] == "Complete" and condition["status"] == "True"
        for condition in conditions
    )


def _claim(service: LLMService, pvc: ClaimCache) -> Manifest:
    labels = child_labels(service, MODEL_CACHE_COMPONENT)
    name = cache_claim_name(service.name)
    claim = child(service, "v1", "PersistentVolumeClaim", name, labels)
    spec: Manifest = {
        "accessModes": [pvc.access_mode],
        "resources": {"requests": {"storage": pvc.size}},
    }
    if pvc.storage_class is not None:
        spec["storageClassName"] = pvc.storage_class
    return claim | {"spec": spec}


def _fetch_job(service: LLMService, name: str, claim: str, options: RenderOptions) -> Manifest:
    labels = child_labels(service, MODEL_CACHE_COMPONENT)
    annotations = model_annotations(service)
    job = child(service, "batch/v1", "Job", name, labels, annotations)
    template: Manifest = {
        "metadata": {"labels": labels, "annotations": annotations},
        "spec": _pod_spec(service, claim, options),
    }
    for field, patch in engine_patches(service, SERVING_POOL):
        placement = {
            key: value for key, value in patch.get("spec", {}).items() if key not in _ENGINE_ONLY
        }
        template = merge_pod_template(
            template, {**patch, "spec": placement}, container=CONTAINER, field=field
        )
    return job | {"spec": {"backoffLimit": _TRIES, "template": template}}


def _pod_spec(service: LLMService, claim: str, options: RenderOptions) -> Manifest:
    spec: Manifest = {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": restricted_pod(),
        "containers": [_container(service, options)],
        "volumes": [claim_volume(claim, read_only=False), tmp_volume()],
    }
    pull_secrets = service_pull_secrets(service, options)
    if pull_secrets:
        spec["imagePullSecrets"] = references(pull_secrets)
    return spec


def _container(service: LLMService, options: RenderOptions) -> Manifest:
    users = environment_of(service.spec.engine.env)
    replaced = {variable["name"] for variable in users}
    ours = [
        # On the claim: a node's disk need not hold the model.
        {"name": "KVOY_HOME", "value": _WORK_FOLDER},
        {"name": "HF_HOME", "value": f"{_WORK_FOLDER}/huggingface"},
        {"name": "HOME", "value": _WORK_FOLDER},
        *hub_environment(service),
    ]
    return {
        "name": CONTAINER,
        "image": service.spec.engine.image or options.engine_image,
        "imagePullPolicy": pull_policy(service, options),
        "command": ["kvoy", "model", "fetch"],
        "args": [service.spec.model.reference, f"--to={cached_model_folder(service)}"],
        "env": [variable for variable in ours if variable["name"] not in replaced] + users,
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
        "securityContext": restricted_container(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [models_mount(read_only=False), tmp_mount()],
    }
