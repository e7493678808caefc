"""Whether the operator can do what a service asks for, beyond what its schema checks. Pure.

A refused service keeps what runs already; its condition names the field and says what to do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvoy_operator.errors import InvalidSpec
from kvoy_operator.kinds import LLM_SERVICE
from kvoy_operator.observed import Body
from kvoy_operator.resources import LLMService
from kvoy_operator.spec_pool import PoolSpec

_NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    message: str


def refusal_of(
    service: LLMService, *, has_lws: bool, router_names: Collection[str]
) -> Refusal | None:
    """None: accepted. `router_names` are the LLMRouters of the service's namespace."""
    return _by_engine(service) or _by_cluster(service, has_lws) or _by_router(service, router_names)


def invalid(error: InvalidSpec) -> Refusal:
    return Refusal("InvalidSpec", f"{error.field}: {error.message}")


def name_clash(manifest: Body, live: Body) -> Refusal:
    """`live` has the name of `manifest` and belongs to somebody else."""
    controllers = [
        f"belongs to {owner['kind']} {owner['name']}"
        for owner in live["metadata"].get("ownerReferences") or ()
        if owner.get("controller")
    ]
    whose = controllers[0] if controllers else "is not Kvoy's"
    return Refusal(
        "NameClash",
        f"metadata.name: the {manifest['kind']} {manifest['metadata']['name']} exists already and "
        f"{whose}; it is left as it is. Delete or rename one of the two.",
    )


def shadowed(body: Body, rival: Body | None) -> Refusal | None:
    """An LLMService with a router of its own and an LLMRouter of one name would share children: the
    older of them has them, or of the same second the service. `rival` is the other of the two."""
    if rival is None or any(_has_shared_router(each) for each in (body, rival)):
        return None
    if _age_order(body) < _age_order(rival):
        return None
    kind, name = rival["kind"], rival["metadata"]["name"]
    remedy = "Rename one of the two"
    if body["kind"] == LLM_SERVICE.name:
        remedy += f", or set spec.router.ref: {name} to be served by it"
    return Refusal(
        "NameClash",
        f"metadata.name: the {kind} {name} is older, and both would have a Service {name}. "
        f"{remedy}.",
    )


def _has_shared_router(body: Body) -> bool:
    return bool(((body.get("spec") or {}).get("router") or {}).get("ref"))


def _age_order(body: Body) -> tuple[str, bool]:
    return body["metadata"]["creationTimestamp"], body["kind"] != LLM_SERVICE.name


def _by_engine(service: LLMService) -> Refusal | None:
    if service.spec.engine.kind != _NATIVE:
        return None
    if service.spec.prefill is not None:
        return _unsupported("spec.prefill", "a separate prefill pool", "remove prefill")
    pool = service.spec
    if pool.nodes > 1:
        return _unsupported("spec.nodes", "engines over several nodes", "set nodes: 1")
    if _num_parts(pool) > 1:
        field = "spec.parallelism" if pool.parallelism else "spec.gpus"
        return _unsupported(field, "models cut over several GPUs", "set gpus: 1")
    return None


def _unsupported(field: str, what: str, remedy: str) -> Refusal:
    return Refusal(
        "UnsupportedByEngine",
        f"{field}: engine.kind native has no {what} yet; {remedy}, or set engine.kind: sim to try "
        f"the platform (sim only simulates, its answers mean nothing).",
    )


def _num_parts(pool: PoolSpec) -> int:
    """Over how many devices one replica is cut."""
    if pool.parallelism is not None:
        return pool.parallelism.tensor * pool.parallelism.pipeline
    return max(1, pool.gpus)


def _by_cluster(service: LLMService, has_lws: bool) -> Refusal | None:
    grouped = [name for name, pool in service.spec.pools.items() if pool.nodes > 1]
    if has_lws or not grouped:
        return None
    field = "spec.prefill.nodes" if grouped[0] == "prefill" else "spec.nodes"
    return Refusal(
        "LWSNotInstalled",
        f"{field}: engines over several nodes need LeaderWorkerSet "
        f"(leaderworkerset.x-k8s.io/v1), which the cluster does not have; install it from "
        f"https://lws.sigs.k8s.io, or set nodes: 1.",
    )


def _by_router(service: LLMService, router_names: Collection[str]) -> Refusal | None:
    ref = service.spec.router.ref
    if ref is None or ref in router_names:
        return None
    return Refusal(
        "RouterNotFound",
        f"spec.router.ref: there is no LLMRouter {ref} in namespace {service.namespace}; create "
        f"it, or remove ref for a router of the service's own.",
    )
