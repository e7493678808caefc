"""How an engine's container comes to its model: argument, environment, volumes. Pure.

    file://            a folder that the container sees anyway
    pvc://             a claim, mounted read-only
    hf:// cache.pvc    a claim that a Job has filled, mounted read-only; the hub is not asked
    hf:// hostPath     a folder of the node: its engines share it, and download under a lock
    hf:// emptyDir     a folder that lives and goes with the pod

A simulated engine has no model; it takes the reference as a mere name.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from kvoy_operator.identity import Manifest, cache_claim_name
from kvoy_operator.manifests.parts import USER_ID
from kvoy_operator.resources import LLMService
from kvoy_operator.spec_model import CLAIM_SCHEME, FILE_SCHEME, HUB_SCHEME

HOME_FOLDER: Final = "/var/lib/kvoy"
MODELS_FOLDER: Final = "/models"
_HOME_VOLUME: Final = "home"
_MODELS_VOLUME: Final = "models"
_SLUG_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class ModelSource:
    arguments: tuple[str, ...]
    """MODEL of `kvoy serve`, and what else it has to be told about it."""
    environment: tuple[Manifest, ...]
    mounts: tuple[Manifest, ...]
    volumes: tuple[Manifest, ...]
    is_on_node: bool = False
    """Whether the models lie in a folder of the node, which has to be made writable first."""


def is_simulated(service: LLMService) -> bool:
    return service.spec.engine.kind == "sim"


def cache_claim(service: LLMService) -> str | None:
    """The claim that a Job fills with the service's model; None: there is none."""
    cache = service.spec.model.cache
    if cache is None or cache.pvc is None or is_simulated(service):
        return None
    return cache.pvc.claim_name or cache_claim_name(service.name)


def cached_model_folder(service: LLMService) -> str:
    """Where the filled claim has the model: its own for each reference, since others share it."""
    reference = service.spec.model.reference
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", reference.removeprefix(HUB_SCHEME))[:_SLUG_CHARS]
    digest = hashlib.sha256(reference.encode()).hexdigest()[:12]
    return f"{MODELS_FOLDER}/{slug}-{digest}"


def model_source(service: LLMService) -> ModelSource:
    model = service.spec.model
    if is_simulated(service) or model.uri.startswith(FILE_SCHEME):
        argument = model.reference.removeprefix(FILE_SCHEME)
        return ModelSource((argument,), _home(), (_home_mount(),), (_home_volume(),))
    if model.uri.startswith(CLAIM_SCHEME):
        claim, _, folder = model.uri.removeprefix(CLAIM_SCHEME).partition("/")
        path = f"{MODELS_FOLDER}/{folder}".rstrip("/")
        return _from_claim(claim, path, _home())
    claim_to_fill = cache_claim(service)
    if claim_to_fill is not None:
        offline = {"name": "HF_HUB_OFFLINE", "value": "1"}
        return _from_claim(claim_to_fill, cached_model_folder(service), (*_home(), offline))
    return _downloaded(service)


def hub_environment(service: LLMService) -> tuple[Manifest, ...]:
    """The token for the hub, if the service names one."""
    reference = service.spec.model.token_secret_ref
    if reference is None:
        return ()
    key = {"name": reference.name, "key": reference.key}
    return ({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}},)


def claim_volume(claim: str, *, read_only: bool) -> Manifest:
    return {
        "name": _MODELS_VOLUME,
        "persistentVolumeClaim": {"claimName": claim, "readOnly": read_only},
    }


def models_mount(*, read_only: bool) -> Manifest:
    return {"name": _MODELS_VOLUME, "mountPath": MODELS_FOLDER, "readOnly": read_only}


def make_writable(image: str, pull_policy: str) -> Manifest:
    """An init container: the kubelet makes a node's folder for root alone."""
    return {
        "name": "prepare-cache",
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": ["chown", f"{USER_ID}:{USER_ID}", MODELS_FOLDER],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
        "securityContext": {
            "runAsUser": 0,
            "runAsNonRoot": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
        },
        "volumeMounts": [models_mount(read_only=False)],
    }


def _from_claim(claim: str, argument: str, environment: tuple[Manifest, ...]) -> ModelSource:
    return ModelSource(
        (argument,),
        environment,
        (_home_mount(), models_mount(read_only=True)),
        (_home_volume(), claim_volume(claim, read_only=True)),
    )


def _downloaded(service: LLMService) -> ModelSource:
    """Each engine's own fetch, into a folder of the node or into its home folder."""
    model = service.spec.model
    environment = (*_home(), *hub_environment(service))
    if model.cache is not None and model.cache.host_path is not None:
        path = {"path": model.cache.host_path.path, "type": "DirectoryOrCreate"}
        return ModelSource(
            (model.reference, f"--download-dir={MODELS_FOLDER}"),
            environment,
            (_home_mount(), models_mount(read_only=False)),
            (_home_volume(), {"name": _MODELS_VOLUME, "hostPath": path}),
            is_on_node=True,
        )
    limit = model.cache.empty_dir.size_limit if model.cache and model.cache.empty_dir else None
    return ModelSource((model.reference,), environment, (_home_mount(),), (_home_volume(limit),))


def _home() -> tuple[Manifest, ...]:
    return (
        {"name": "KVOY_HOME", "value": HOME_FOLDER},
        {"name": "HF_HOME", "value": f"{HOME_FOLDER}/huggingface"},
    )


def _home_mount() -> Manifest:
    return {"name": _HOME_VOLUME, "mountPath": HOME_FOLDER}


def _home_volume(size_limit: str | None = None) -> Manifest:
    limit = {} if size_limit is None else {"sizeLimit": size_limit}
    return {"name": _HOME_VOLUME, "emptyDir": limit}
