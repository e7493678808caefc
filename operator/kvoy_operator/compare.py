"""Whether a live object has everything that we would apply. Pure.

The API server fills in defaults, and others may own fields of their own: so what is compared is
each field that is desired, never what lies beside it. Lists follow Kubernetes' own merge keys; a
list without one is one value. Quantities are compared by amount. That a field which is no longer
wanted has gone cannot be seen this way: for that, `stamped` puts a digest of the whole manifest on
the object.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from kvoy_contract.names import API_GROUP
from kvoy_operator.identity import Manifest
from kvoy_operator.observed import Body
from kvoy_operator.quantities import is_equal_quantity

Path: TypeAlias = tuple[str, ...]

DIGEST_ANNOTATION: Final = f"{API_GROUP}/digest"

# Kubernetes' merge keys, by the list's field name and, where the name alone does not tell, the
# field that it lies in. https://kubernetes.io/docs/reference/generated/kubernetes-api
_MERGE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
}
_PORT_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "containers": ("containerPort", "protocol"),
    "initContainers": ("containerPort", "protocol"),
    "spec": ("port", "protocol"),
}
_SETS: Final = frozenset({"finalizers", "accessModes"})
_DEFAULT_KEYS: Final = {"protocol": "TCP"}
_LEFT_OUT_WHEN_EMPTY: Final = frozenset(
    {"labels", "annotations", "matchLabels", "nodeSelector", "requests", "limits", "data"}
)
"""Other empty maps, such as `emptyDir: {}`, mean something and are kept."""
_LEFT_OUT_WHEN_ZERO: Final = frozenset(
    {"readOnly", "value", "hostNetwork", "hostPID", "hostIPC", "minReadySeconds", "paused"}
)
"""Other zeros, such as `automountServiceAccountToken: false`, are kept."""
_QUANTITY_MAPS: Final = frozenset({"requests", "limits", "capacity", "hard"})
_QUANTITY_FIELDS: Final = frozenset({"sizeLimit", "divisor"})


def stamped(manifest: Manifest) -> Manifest:
    """A copy with a digest of itself in an annotation: when the manifest loses a field, the digest
    differs from the live object's, and applying takes the field away."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = dict(manifest["metadata"])
    metadata["annotations"] = {**metadata.get("annotations", {}), DIGEST_ANNOTATION: digest}
    return {**manifest, "metadata": metadata}


def is_applied(desired: Body, live: Body) -> bool:
    """Whether every field of `desired` is in `live`."""
    if desired.get("kind") == "Secret" and "stringData" in desired:
        desired = _with_data(desired)
    return _is_in(desired, live, ())


def _is_in(desired: Any, live: Any, path: Path) -> bool:
    if isinstance(desired, Mapping):
        return _is_map_in(desired, live, path)
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        return _is_list_in(desired, live, path)
    if desired is None:
        return True
    if live is None:
        return not desired and path[-1] in _LEFT_OUT_WHEN_ZERO
    if _is_quantity(path) and isinstance(live, str | int):
        return is_equal_quantity(desired, live)
    return type(desired) is type(live) and desired == live


def _is_map_in(desired: Mapping[str, Any], live: Any, path: Path) -> bool:
    if live is None:
        return not desired and path[-1] in _LEFT_OUT_WHEN_EMPTY
    if not isinstance(live, Mapping):
        return False
    return all(_is_in(value, live.get(key), (*path, key)) for key, value in desired.items())


def _is_list_in(desired: Sequence[Any], live: Any, path: Path) -> bool:
    if live is None:
        return not desired
    if not isinstance(live, list):
        return False
    if path and path[-1] in _SETS:
        return set(desired) <= set(live)
    keys = _merge_keys(path)
    if keys:
        present = {_identity(item, keys): item for item in live}
        return all(_is_in(item, present.get(_identity(item, keys)), path) for item in desired)
    return len(desired) == len(live) and all(
        _is_in(mine, theirs, path) for mine, theirs in zip(desired, live, strict=True)
    )


def _merge_keys(path: Path) -> tuple[str, ...] | None:
    if not path:
        return None
    if path[-1] == "ports":
        return _PORT_KEYS.get(path[-2])
    return _MERGE_KEYS.get(path[-1])


def _identity(item: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(item.get(key, _DEFAULT_KEYS.get(key)) for key in keys)


def _is_quantity(path: Path) -> bool:
    if path[-1] in _QUANTITY_FIELDS:
        return True
    return len(path) > 1 and path[-2] in _QUANTITY_MAPS


def _with_data(secret: Body) -> dict[str, Any]:
    """The server keeps `stringData` as `data`."""
    encoded = {
        key: base64.b64encode(text.encode()).decode() for key, text in secret["stringData"].items()
    }
    rest = {key: value for key, value in secret.items() if key != "stringData"}
    return {**rest, "data": {**(secret.get("data") or {}), **encoded}}
