"""A pool: replicas of one engine shape. The serving pool's fields lie at the top of a service."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from pydantic import Field, StrictInt

from kvoy_operator.cel_rules import Rule
from kvoy_operator.quantities import is_equal_quantity
from kvoy_operator.spec_fields import (
    ObjectName,
    PodTemplate,
    QualifiedName,
    Quantity,
    Resources,
    SpecModel,
    fixed,
    implied,
)

DEFAULT_GPU_RESOURCE: Final = "nvidia.com/gpu"
DEFAULT_SHM_SIZE: Final = "8Gi"
MAX_REPLICAS: Final = 1000
MAX_NODES: Final = 128
MAX_GPUS: Final = 128

_GPU_RESOURCE_CEL: Final = (
    f"(has(self.resourceName) ? self.resourceName : '{DEFAULT_GPU_RESOURCE}')"
)


class Parallelism(SpecModel):
    """How one replica of the model is cut over its GPUs."""

    tensor: StrictInt = fixed(
        1, "Parts that each layer is cut into.", ge=1, le=MAX_GPUS * MAX_NODES
    )
    pipeline: StrictInt = fixed(
        1, "Parts that the layers are dealt to.", ge=1, le=MAX_GPUS * MAX_NODES
    )


class ResourceClaim(SpecModel):
    """A claim for devices by dynamic resource allocation; the engine's container uses it."""

    name: str = Field(
        description="Name of the claim within the pod.",
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        min_length=1,
        max_length=63,
    )
    resource_claim_template_name: ObjectName | None = implied(
        None, "A ResourceClaimTemplate of the namespace: each pod gets a claim of its own."
    )
    resource_claim_name: ObjectName | None = implied(
        None, "A ResourceClaim of the namespace, which all pods share."
    )
    request: str | None = implied(
        None,
        "The request of the claim that the engine uses. Default: all.",
        min_length=1,
        max_length=127,
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "",
            "resourceClaims: each needs either resourceClaimTemplateName or resourceClaimName",
            "has(self.resourceClaimTemplateName) != has(self.resourceClaimName)",
            lambda claim: (
                (claim.resource_claim_template_name is None) != (claim.resource_claim_name is None)
            ),
        ),
    )


def _limits_devices_as_requested(pool: Any) -> bool:
    requests, limits = pool.resources.requests, pool.resources.limits
    return all(
        name in limits and is_equal_quantity(requests[name], limits[name])
        for name in requests
        if "/" in name
    )


_RULES: Final = (
    Rule(
        "parallelism",
        "parallelism: tensor x pipeline must equal nodes x gpus (nodes alone without gpus); change "
        "one of them, or remove parallelism to get tensor = gpus and pipeline = nodes",
        "!has(self.parallelism) || self.parallelism.tensor * self.parallelism.pipeline == "
        "self.nodes * (self.gpus > 1 ? self.gpus : 1)",
        lambda pool: (
            pool.parallelism is None
            or pool.parallelism.tensor * pool.parallelism.pipeline == pool.nodes * max(pool.gpus, 1)
        ),
    ),
    Rule(
        "resourceName",
        "resourceName: GPUs come either from a device plugin (resourceName) or from "
        "resourceClaims; remove one of the two",
        "!has(self.resourceName) || !has(self.resourceClaims) || self.resourceClaims.size() == 0",
        lambda pool: pool.resource_name is None or not pool.resource_claims,
    ),
    Rule(
        "resourceName",
        "resourceName: says what gpus counts; set gpus, or remove resourceName",
        "!has(self.resourceName) || self.gpus > 0",
        lambda pool: pool.resource_name is None or pool.gpus > 0,
    ),
    Rule(
        "resources",
        "resources: GPUs are asked for by gpus (and resourceName); set gpus and remove them here",
        f"!has(self.resources) || "
        f"(!has(self.resources.limits) || !({_GPU_RESOURCE_CEL} in self.resources.limits)) && "
        f"(!has(self.resources.requests) || !({_GPU_RESOURCE_CEL} in self.resources.requests))",
        lambda pool: pool.gpu_resource not in {**pool.resources.requests, **pool.resources.limits},
    ),
    Rule(
        "resources",
        "resources: a device (a name with '/') needs a limit that equals its request; set both "
        "to the same number",
        "!has(self.resources) || !has(self.resources.requests) || "
        "self.resources.requests.all(name, !name.contains('/') || "
        "has(self.resources.limits) && name in self.resources.limits && "
        "quantity(string(self.resources.requests[name]))"
        ".compareTo(quantity(string(self.resources.limits[name]))) == 0)",
        _limits_devices_as_requested,
    ),
    Rule(
        "topologyKey",
        "topologyKey: keeps the pods of a group of nodes together; set nodes above 1, or remove it",
        "!has(self.topologyKey) || self.nodes > 1",
        lambda pool: pool.topology_key is None or pool.nodes > 1,
    ),
)


class PoolSpec(SpecModel):
    """Replicas of one shape: so many nodes with so many GPUs each."""

    replicas: StrictInt | None = implied(
        None,
        "Number of replicas: pods, or groups of pods where nodes is above 1. Left out, the "
        "LLMRoleScaler of the pool has the number, so that an autoscaler can set it.",
        ge=0,
        le=MAX_REPLICAS,
    )
    nodes: StrictInt = fixed(
        1,
        "Nodes that one replica spans. Above 1 a replica is a group of pods, one per node, by a "
        "LeaderWorkerSet, which the cluster must have.",
        ge=1,
        le=MAX_NODES,
    )
    gpus: StrictInt = fixed(
        0, "GPUs of one pod; a replica has nodes x gpus. 0 computes on CPUs.", ge=0, le=MAX_GPUS
    )
    resource_name: QualifiedName | None = implied(
        None, "Resource that gpus counts, of a device plugin. Default: nvidia.com/gpu."
    )
    resource_claims: tuple[ResourceClaim, ...] = implied(
        (),
        "Claims that bring the devices, instead of a device plugin; gpus then says how many "
        "devices they bring.",
        list_keys=("name",),
        max_length=8,
    )
    parallelism: Parallelism | None = implied(
        None,
        "How one replica is cut over its GPUs. Default: tensor = gpus within a node, pipeline = "
        "nodes.",
    )
    resources: Resources = implied(
        Resources(), "CPU, memory and the like of the engine's container, but not its GPUs."
    )
    shm_size: Quantity = implied(
        DEFAULT_SHM_SIZE,
        "Most bytes of shared memory (/dev/shm), by which the processes of one pod talk. What is "
        "used counts as the pod's memory. Default: 8Gi.",
    )
    topology_key: QualifiedName | None = implied(
        None,
        "Label of nodes, such as a rack's: all pods of one group run where it has one value, and "
        "no other group with them.",
    )
    pod_template: PodTemplate | None = implied(
        None,
        "A patch of this pool's pods, after that of engine.podTemplate; the engine's container is "
        "named engine.",
    )
    rules: ClassVar[tuple[Rule, ...]] = _RULES

    @property
    def gpu_resource(self) -> str:
        """What `gpus` counts at a device plugin."""
        return self.resource_name or DEFAULT_GPU_RESOURCE

    @property
    def effective_parallelism(self) -> Parallelism:
        """As given, else tensor parallel within a node and pipeline parallel between nodes."""
        return self.parallelism or Parallelism(tensor=max(self.gpus, 1), pipeline=self.nodes)
