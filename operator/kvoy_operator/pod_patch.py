"""Strategic-merge patches of pod templates, as `kubectl patch` and the API server merge them.

Maps merge; null removes a field; a list is replaced, except those of Kubernetes' own types whose
elements have a key (containers by name, ports by number, ...): these merge element by element.
`$patch: delete` removes an element or empties a map, `$patch: replace` takes the patch alone, and
`$retainKeys` names the fields to keep. A test holds the result equal to the API server's.

Pure. `pod_guard` then refuses what would take away what the operator needs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvoy_operator.errors import InvalidSpec
from kvoy_operator.pod_guard import check_pod_template

_DIRECTIVE: Final = "$patch"
_RETAIN_KEYS: Final = "$retainKeys"
_UNSUPPORTED: Final = ("$setElementOrder/", "$deleteFromPrimitiveList/")

Map = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where in a type keyed lists are."""

    maps: Mapping[str, _Shape] = field(default_factory=dict)
    lists: Mapping[str, tuple[str, _Shape]] = field(default_factory=dict)
    """Name of the list: its merge key, and the shape of its elements."""


_PLAIN: Final = _Shape()
_CONTAINER: Final = _Shape(
    lists={
        "env": ("name", _PLAIN),
        "ports": ("containerPort", _PLAIN),
        "volumeDevices": ("devicePath", _PLAIN),
        "volumeMounts": ("mountPath", _PLAIN),
    }
)
_POD: Final = _Shape(
    lists={
        "containers": ("name", _CONTAINER),
        "ephemeralContainers": ("name", _CONTAINER),
        "evictionResponders": ("name", _PLAIN),
        "hostAliases": ("ip", _PLAIN),
        "imagePullSecrets": ("name", _PLAIN),
        "initContainers": ("name", _CONTAINER),
        "resourceClaims": ("name", _PLAIN),
        "schedulingGates": ("name", _PLAIN),
        "topologySpreadConstraints": ("topologyKey", _PLAIN),
        "volumes": ("name", _PLAIN),
    }
)
_TEMPLATE: Final = _Shape(maps={"spec": _POD})


def merge_pod_template(
    base: Map, patch: Map, *, container: str = "engine", field: str = "spec.podTemplate"
) -> dict[str, Any]:
    """The template `base` with `patch` merged into it; neither is changed.

    Raises InvalidSpec, with a path below `field`, for a patch that cannot be merged or that takes
    away what the operator needs of the template or of its container named `container`.
    """
    _check_directives(patch, field)
    merged = _merge_map(copy.deepcopy(dict(base)), patch, _TEMPLATE, field)
    check_pod_template(base, merged, container=container, field=field)
    return merged


def _merge_map(base: dict[str, Any], patch: Map, shape: _Shape, path: str) -> dict[str, Any]:
    if _DIRECTIVE in patch:
        return _replacement(patch) if patch[_DIRECTIVE] == "replace" else {}
    if _RETAIN_KEYS in patch:
        base = _retain(base, patch, path)
    for name, value in patch.items():
        if name == _RETAIN_KEYS:
            continue
        if value is None:
            base.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(base.get(name), dict):
            inner = shape.maps.get(name, _PLAIN)
            base[name] = _merge_map(base[name], value, inner, f"{path}.{name}")
        elif name in shape.lists:
            key, inner = shape.lists[name]
            base[name] = _merge_list(base.get(name) or [], value, key, inner, f"{path}.{name}")
        elif isinstance(value, Mapping) and _DIRECTIVE in value:
            base.pop(name, None)
        else:
            base[name] = _without_directives(value)
    return base


def _merge_list(
    base: list[dict[str, Any]], patch: object, key: str, shape: _Shape, path: str
) -> list[dict[str, Any]]:
    elements = _keyed_elements(patch, key, path)
    if any(element.get(_DIRECTIVE) == "replace" for element in elements):
        return [_without_directives(e) for e in elements if _DIRECTIVE not in e]
    deleted = {element[key] for element in elements if element.get(_DIRECTIVE) == "delete"}
    kept = [element for element in base if element.get(key) not in deleted]
    merged = list(kept)
    changes = [element for element in elements if _DIRECTIVE not in element]
    for change in changes:
        index = next((i for i, e in enumerate(merged) if e.get(key) == change[key]), None)
        if index is None:
            merged.append(_without_directives(change))
        else:
            merged[index] = _merge_map(merged[index], change, shape, f"{path}[{change[key]}]")
    return _ordered(merged, kept, changes, key)


def _ordered(
    merged: list[dict[str, Any]], base: Sequence[Map], patch: Sequence[Map], key: str
) -> list[dict[str, Any]]:
    """Patched elements in the patch's order, the others put in before those they stood before."""
    place = {element[key]: index for index, element in reversed([*enumerate(base)])}
    patch_place = {element[key]: index for index, element in reversed([*enumerate(patch)])}
    others = [element for element in merged if element[key] not in patch_place]
    patched = sorted(
        (element for element in merged if element[key] in patch_place),
        key=lambda element: patch_place[element[key]],
    )
    ordered: list[dict[str, Any]] = []
    while others and patched:
        other, next_patched = others[0][key], patched[0][key]
        is_before = next_patched in place and place[other] < place[next_patched]
        ordered.append(others.pop(0) if is_before else patched.pop(0))
    return [*ordered, *others, *patched]


def _keyed_elements(patch: object, key: str, path: str) -> list[Map]:
    if not isinstance(patch, Sequence) or isinstance(patch, str):
        raise InvalidSpec(path, "must be a list")
    for element in patch:
        if not isinstance(element, Mapping):
            raise InvalidSpec(path, "each element must be a map of fields")
        if element.get(key) is None and element.get(_DIRECTIVE) != "replace":
            raise InvalidSpec(path, f"each element needs {key}, by which lists are merged")
    return list(patch)


def _check_directives(patch: Any, path: str) -> None:
    """Everywhere in the patch, also where it meets nothing to merge with."""
    if isinstance(patch, Mapping):
        for name, value in patch.items():
            if str(name).startswith(_UNSUPPORTED):
                raise InvalidSpec(f"{path}.{name}", "not supported; remove it")
            _check_directives(value, f"{path}.{name}")
        if patch.get(_DIRECTIVE, "delete") not in ("delete", "replace"):
            raise InvalidSpec(f"{path}.{_DIRECTIVE}", "must be delete or replace")
    elif isinstance(patch, list):
        for index, element in enumerate(patch):
            name = element.get("name", index) if isinstance(element, Mapping) else index
            _check_directives(element, f"{path}[{name}]")


def _retain(base: dict[str, Any], patch: Map, path: str) -> dict[str, Any]:
    retained = patch[_RETAIN_KEYS]
    if not isinstance(retained, list):
        raise InvalidSpec(f"{path}.{_RETAIN_KEYS}", "must be a list of field names")
    for name in sorted(patch.keys() - {_RETAIN_KEYS, *retained}):
        if patch[name] is not None:
            raise InvalidSpec(f"{path}.{name}", f"is set here but not in {_RETAIN_KEYS}; add it")
    return {name: value for name, value in base.items() if name in retained}


def _replacement(patch: Map) -> dict[str, Any]:
    fields = {name: value for name, value in patch.items() if name != _DIRECTIVE}
    return dict(_without_directives(fields))


def _without_directives(value: Any) -> Any:
    """A copy of a patch's part that meets nothing to merge with: no directives, no nulls."""
    if isinstance(value, Mapping):
        return {
            name: _without_directives(inner)
            for name, inner in value.items()
            if inner is not None
            and name != _RETAIN_KEYS
            and not (isinstance(inner, Mapping) and _DIRECTIVE in inner)
        }
    if isinstance(value, list):
        return [
            _without_directives(inner)
            for inner in value
            if not (isinstance(inner, Mapping) and _DIRECTIVE in inner)
        ]
    return value
