"""What there is in a namespace, without what differs from one life to the next: names that were
drawn, uids, times, addresses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvoy_contract.names import POOL_LABEL, REVISION_LABEL
from kvoy_operator.kinds import LLM_SERVICE, POD, Kind
from kvoy_operator.observed import Body

_DRAWN = frozenset({"clusterIP", "clusterIPs", "lastTransitionTime", "healthCheckNodePort"})
_UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def end_state(objects: Iterable[tuple[Kind, Body]], secrets: Iterable[Body]) -> dict[str, Any]:
    """By kind and name; pods, whose names are drawn, by what they are for."""
    state: dict[str, Any] = {}
    for kind, body in objects:
        if kind == POD:
            name = f"Pods {_purpose(body)}"
            state[name] = state.get(name, 0) + 1
        else:
            state[f"{kind.name} {body['metadata']['name']}"] = _lasting(kind, body)
    for body in secrets:
        # What is in them is derived from the namespace's and the service's own names.
        state[f"Secret {body['metadata']['name']}"] = _metadata(body) | {
            "keys": sorted(body["data"])
        }
    return state


def _purpose(pod: Body) -> str:
    labels = pod["metadata"]["labels"]
    names = (labels.get(POOL_LABEL, "router"), labels.get(REVISION_LABEL, ""))
    going = " going" if "deletionTimestamp" in pod["metadata"] else ""
    ready = any(
        c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())
    )
    return f"{' '.join(names)} {'ready' if ready else 'unready'}{going}"


def _lasting(kind: Kind, body: Body) -> dict[str, Any]:
    lasting = {name: body[name] for name in ("spec", "roleRef", "subjects") if name in body}
    if kind.is_ours:
        lasting["status"] = body.get("status")
    state: dict[str, Any] = _without_drawn(lasting) | _metadata(body)
    namespace = body["metadata"]["namespace"]
    text = _UID.sub("UID", json.dumps(state).replace(namespace, "NAMESPACE"))
    again: dict[str, Any] = json.loads(text)
    if kind == LLM_SERVICE and again["status"]:
        # Counted by the server at each edit of the spec.
        again["status"].pop("observedGeneration", None)
    return again


def _metadata(body: Body) -> dict[str, Any]:
    metadata = body["metadata"]
    owners = [(owner["kind"], owner["name"]) for owner in metadata.get("ownerReferences") or ()]
    return {"labels": metadata.get("labels"), "owners": [list(owner) for owner in owners]}


def _without_drawn(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_drawn(inner) for name, inner in value.items() if name not in _DRAWN}
    if isinstance(value, list):
        return [_without_drawn(inner) for inner in value]
    return value


def differences(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Where two states differ, in words."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        names = sorted({*wanted, *found})
        return [
            each
            for name in names
            for each in differences(wanted.get(name), found.get(name), f"{path}/{name}")
        ]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = enumerate(zip(wanted, found, strict=True))
        return [e for n, (one, other) in pairs for e in differences(one, other, f"{path}/{n}")]
    return [] if wanted == found else [f"{path}: {found} instead of {wanted}"]


def in_words(body: Body) -> str:
    """One object and its status, for the message of a test that fails."""
    metadata, status = body["metadata"], body.get("status") or {}
    shown = {name: value for name, value in status.items() if name != "conditions"}
    conditions = {
        each["type"]: f"{each['status']} {each.get('reason', '')} {each.get('message', '')}"
        for each in status.get("conditions") or ()
    }
    replicas = (body.get("spec") or {}).get("replicas")
    return (
        f"{metadata['name']} version {metadata['resourceVersion']} "
        f"generation {metadata.get('generation')} replicas {replicas} {shown} {conditions}"
    )
