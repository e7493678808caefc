"""Whose a live object is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvoy_contract.names import (
    API_GROUP,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROUTER_LABEL,
    SERVICE_LABEL,
)
from kvoy_operator.kinds import LLM_SERVICE
from kvoy_operator.observed import Body


class Ownership(Enum):
    OURS = "ours"
    ORPHAN = "orphan"
    """Ours by its labels, but nobody's: it lost its owner and is taken over."""
    DYING = "dying"
    """It belonged to an owner of that name who is gone: garbage collection is on its way."""
    STRANGER = "stranger"


def ownership(live: Body, owner: Body) -> Ownership:
    """Whether a live object may be treated as `owner`'s child."""
    controller = _controller(live)
    if controller is not None:
        if controller["uid"] == owner["metadata"]["uid"]:
            return Ownership.OURS
        same_name = (controller["kind"], controller["name"]) == (
            owner["kind"],
            owner["metadata"]["name"],
        )
        if same_name and controller["apiVersion"].startswith(f"{API_GROUP}/"):
            return Ownership.DYING
        return Ownership.STRANGER
    labels = live["metadata"].get("labels") or {}
    owner_label = SERVICE_LABEL if owner["kind"] == LLM_SERVICE.name else ROUTER_LABEL
    is_orphan = (
        labels.get(MANAGED_BY_LABEL) == MANAGED_BY
        and labels.get(owner_label) == owner["metadata"]["name"]
    )
    return Ownership.ORPHAN if is_orphan else Ownership.STRANGER


def has_metadata(manifest: Body, live: Body) -> bool:
    """Whether a live object has all labels of the manifest."""
    wanted: Mapping[str, Any] = manifest["metadata"]["labels"]
    labels = live["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in wanted.items())


def _controller(live: Body) -> Mapping[str, Any] | None:
    references = live["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), None)
