"""What to write so that a resource's children are as rendered: desired against observed. Pure.

    create      is not there; the writer makes sure that no stranger has the name
    apply       is there and ours, and lacks something that is desired
    reown       is written only once and has lost its owner or has a deleted one: only its owner
                reference is replaced, so that engines keep their template
    delete      is ours and no longer desired
    conflicts   has a wanted name and is not ours: it is left alone

Objects that the operator may not read (Secrets) are compared with the digest that it wrote last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvoy_contract.names import (
    API_GROUP,
    COMPONENT_LABEL,
    ENGINE_COMPONENT,
    MANAGED_BY,
    MANAGED_BY_LABEL,
)
from kvoy_operator.compare import DIGEST_ANNOTATION, digest_of, is_applied, stamped
from kvoy_operator.identity import Manifest, owner_label, owner_reference
from kvoy_operator.manifests import is_written_once
from kvoy_operator.observed import Body, ChildKey, Observed
from kvoy_operator.resources import LLMRouter, LLMService

_UNREADABLE: Final = frozenset({"Secret"})
_MOUNTED: Final = frozenset({"PersistentVolumeClaim", "ServiceAccount", "Job"})
"""What pods of an old revision may still need."""


@dataclass(frozen=True, slots=True)
class Plan:
    create: tuple[Manifest, ...] = ()
    apply: tuple[Manifest, ...] = ()
    reown: tuple[tuple[ChildKey, Manifest], ...] = ()
    """Each with the owner reference that it gets."""
    delete: tuple[ChildKey, ...] = ()
    conflicts: tuple[ChildKey, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.create or self.apply or self.reown or self.delete)


def make_plan(
    owner: LLMService | LLMRouter,
    desired: Iterable[Manifest],
    observed: Observed,
    written: Mapping[ChildKey, str],
    *,
    is_settled: bool,
) -> Plan:
    """`desired` are all children that there should be, workloads of every revision left out;
    `written` has the digests of unreadable objects as this process wrote them; `is_settled`: no
    pods of an old revision are left."""
    create, apply, conflicts = [], [], []
    wanted: set[ChildKey] = set()
    for manifest in map(stamped, desired):
        key = key_of(manifest)
        wanted.add(key)
        live = observed.children.get(key)
        if key.kind in _UNREADABLE:
            if written.get(key) != digest_of(manifest):
                apply.append(manifest)
        elif live is None:
            create.append(manifest)
        elif not is_ours(owner, live):
            conflicts.append(key)
        elif not is_written_once(manifest) and not _is_up_to_date(manifest, live):
            apply.append(manifest)
    return Plan(
        create=tuple(create),
        apply=tuple(apply),
        reown=tuple(_reown(owner, observed)),
        delete=tuple(_surplus(owner, observed, wanted, is_settled)),
        conflicts=tuple(conflicts),
    )


def key_of(manifest: Body) -> ChildKey:
    return ChildKey(manifest["kind"], manifest["metadata"]["name"])


def is_ours(owner: LLMService | LLMRouter, live: Body) -> bool:
    """Whether a live object is `owner`'s: by its controller, or, when it has none any more or one
    of the same name that was deleted, by its labels."""
    controller = _controller(live)
    if controller is None:
        return _has_our_labels(owner, live)
    if controller.get("uid") == owner.uid:
        return True
    is_namesake = (controller.get("kind"), controller.get("name")) == (owner.kind, owner.name)
    is_kvoy = str(controller.get("apiVersion", "")).startswith(f"{API_GROUP}/")
    return is_namesake and is_kvoy and _has_our_labels(owner, live)


def _is_up_to_date(manifest: Manifest, live: Body) -> bool:
    annotations = live["metadata"].get("annotations") or {}
    has_digest = annotations.get(DIGEST_ANNOTATION) == digest_of(manifest)
    return has_digest and is_applied(manifest, live)


def _reown(
    owner: LLMService | LLMRouter, observed: Observed
) -> Iterable[tuple[ChildKey, Manifest]]:
    for key, live in observed.children.items():
        controller = _controller(live) or {}
        is_kept = _is_engines(live) or key.kind == "Job"
        if is_kept and is_ours(owner, live) and controller.get("uid") != owner.uid:
            yield key, owner_reference(owner)


def _surplus(
    owner: LLMService | LLMRouter, observed: Observed, wanted: set[ChildKey], is_settled: bool
) -> Iterable[ChildKey]:
    for key, live in observed.children.items():
        if key in wanted or _is_engines(live) or not is_ours(owner, live):
            continue
        is_going = "deletionTimestamp" in live["metadata"]
        if not is_going and (is_settled or key.kind not in _MOUNTED):
            yield key


def _is_engines(live: Body) -> bool:
    """A pool's workload: when that goes, the rollout decides."""
    labels = live["metadata"].get("labels") or {}
    is_workload = live["kind"] in ("Deployment", "LeaderWorkerSet")
    return is_workload and labels.get(COMPONENT_LABEL) == ENGINE_COMPONENT


def _controller(live: Body) -> Mapping[str, Any] | None:
    owners = live["metadata"].get("ownerReferences") or ()
    return next((each for each in owners if each.get("controller")), None)


def _has_our_labels(owner: LLMService | LLMRouter, live: Body) -> bool:
    labels = live["metadata"].get("labels") or {}
    expected = {MANAGED_BY_LABEL: MANAGED_BY, **owner_label(owner)}
    return all(labels.get(key) == value for key, value in expected.items())
