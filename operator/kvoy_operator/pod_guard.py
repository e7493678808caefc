"""What a user's patch of a pod template must leave as the operator made it.

Compares the template before and after the patch, so it does not matter how a patch is written. Each
refusal names the field, and the field of the resource that is meant for it where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvoy_contract.names import API_GROUP, MANAGED_BY_LABEL
from kvoy_operator.errors import InvalidSpec

_POD_FIELDS: Final = {
    "automountServiceAccountToken": "who holds a Kubernetes token is the operator's; remove it",
    "restartPolicy": "the operator needs it as it is; remove it",
    "terminationGracePeriodSeconds": "follows from the drain timeout; set rollout.drainTimeout",
}
_ROUTER: Final = "router"
_ROUTER_FIELDS: Final = {
    "serviceAccountName": "the router finds its engines by this account's rights; remove it",
}
_CONTAINER_FIELDS: Final = {
    "command": "the operator sets it; add arguments by engine.args",
    "args": "the operator sets them; add arguments by engine.args",
    "lifecycle": "the operator drains requests by it; remove it",
    "terminationMessagePath": "the operator reads failures from it; remove it",
    "terminationMessagePolicy": "the operator reads failures by it; remove it",
}
_LABELS: Final = ("app.kubernetes.io/name", MANAGED_BY_LABEL)
_LABEL_DOMAINS: Final = (f"{API_GROUP}/", "leaderworkerset.sigs.k8s.io/")
_OUR_ENV: Final = "KVOY_"
_GROUP_ENV: Final = "LWS_"
"""Set by LeaderWorkerSet after us."""

Map = Mapping[str, Any]


def check_pod_template(base: Map, merged: Map, *, container: str, field: str) -> None:
    """Raises InvalidSpec, with a path below `field`, for what the patch must not have changed."""
    _check_labels(_labels(base), _labels(merged), f"{field}.metadata.labels")
    spec, merged_spec = base["spec"], merged.get("spec") or {}
    spec_path = f"{field}.spec"
    _check_fields(spec, merged_spec, _POD_FIELDS, spec_path)
    if container == _ROUTER:
        _check_fields(spec, merged_spec, _ROUTER_FIELDS, spec_path)
    _check_kept(spec, merged_spec, "volumes", ("name",), spec_path)
    path = f"{spec_path}.containers[{container}]"
    ours = _element(spec.get("containers"), container)
    patched = _element(merged_spec.get("containers"), container)
    if ours is None:
        raise AssertionError(f"the template has no container {container}")
    if patched is None:
        raise InvalidSpec(path, f"the container {container} must stay")
    _check_container(ours, patched, path)


def _check_container(ours: Map, patched: Map, path: str) -> None:
    _check_fields(ours, patched, _CONTAINER_FIELDS, path)
    _check_kept(ours, patched, "ports", ("containerPort", "name", "protocol"), path)
    _check_kept(ours, patched, "volumeMounts", ("mountPath", "name", "subPath"), path)
    for name in sorted(_env_names(ours, _OUR_ENV) | _env_names(patched, _GROUP_ENV)):
        if _element(ours.get("env"), name) != _element(patched.get("env"), name):
            raise InvalidSpec(f"{path}.env[{name}]", "the operator sets it; remove it")
    for kind in ("limits", "requests"):
        before = (ours.get("resources") or {}).get(kind) or {}
        after = (patched.get("resources") or {}).get(kind) or {}
        for name in sorted(before):
            if "/" in name and str(after.get(name)) != str(before[name]):
                message = "follows from gpus and resources of the pool; change it there"
                raise InvalidSpec(f"{path}.resources.{kind}.{name}", message)


def _check_labels(before: Map, after: Map, path: str) -> None:
    for name in sorted({*before, *after}):
        is_ours = name in _LABELS or name.startswith(_LABEL_DOMAINS)
        if is_ours and before.get(name) != after.get(name):
            raise InvalidSpec(f"{path}.{name}", "the operator finds its pods by it; remove it")


def _check_fields(before: Map, after: Map, messages: Map, path: str) -> None:
    for name, message in messages.items():
        if before.get(name) != after.get(name):
            raise InvalidSpec(f"{path}.{name}", message)


def _check_kept(before: Map, after: Map, name: str, parts: Iterable[str], path: str) -> None:
    """Every element before the patch is there after it, alike in `parts`."""
    kept = [tuple(element.get(part) for part in parts) for element in after.get(name) or ()]
    for element in before.get(name) or ():
        identity = tuple(element.get(part) for part in parts)
        if identity not in kept:
            message = f"the operator needs {identity[0]} as it is; take it out of the patch"
            raise InvalidSpec(f"{path}.{name}", message)


def _labels(template: Map) -> Map:
    return (template.get("metadata") or {}).get("labels") or {}


def _element(elements: Iterable[Map] | None, name: str) -> Map | None:
    return next((element for element in elements or () if element.get("name") == name), None)


def _env_names(container: Map, prefix: str) -> set[str]:
    names = {str(variable["name"]) for variable in container.get("env") or ()}
    return {name for name in names if name.startswith(prefix)}
