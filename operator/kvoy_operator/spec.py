"""The custom resources that users write, as typed values: published by `crd`, read by `resources`.

Attributes are the YAML's names in snake_case. Unknown fields are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field, StrictInt

from kvoy_contract.fleet import DEFAULT_WEIGHT, MAX_WEIGHT
from kvoy_contract.names import PREFILL_POOL, SERVING_POOL
from kvoy_operator.cel_rules import Rule, duration_within, never_changes
from kvoy_operator.durations import Duration
from kvoy_operator.spec_engine import EngineSpec
from kvoy_operator.spec_fields import (
    LabelValue,
    ObjectName,
    QualifiedName,
    SecretReference,
    SpecModel,
    Time,
    fixed,
    implied,
)
from kvoy_operator.spec_model import ModelSpec
from kvoy_operator.spec_pool import MAX_REPLICAS, PoolSpec
from kvoy_operator.spec_router import RouterOptions, RouterSpec

DEFAULT_SURGE_TIMEOUT: Final = Duration("2m")
DEFAULT_DRAIN_TIMEOUT: Final = Duration("5m")
PROGRESS_ALLOWANCE_S: Final = 600.0
"""Beyond the load limit, for scheduling and for pulling images."""


class Rollout(SpecModel):
    """How a changed service replaces its engines."""

    strategy: Literal["Auto", "Surge", "Replace"] = fixed(
        "Auto",
        "Surge starts a new replica before an old one ends, and waits for room. Replace ends old "
        "ones first. Auto tries to surge, and replaces when the cluster has no room within "
        "surgeTimeout.",
    )
    max_unavailable: StrictInt = fixed(
        1,
        "Replicas of a pool that may be missing while the old ones are replaced. With one replica "
        "that is an outage, which the status announces.",
        ge=1,
        le=MAX_REPLICAS,
    )
    surge_timeout: Time = implied(
        DEFAULT_SURGE_TIMEOUT,
        "How long a surging replica may wait for room before Auto replaces instead. Default: 2m.",
    )
    progress_deadline: Time | None = implied(
        None,
        "Time without progress after which a rollout stops, with the reason "
        "ProgressDeadlineExceeded, while the old replicas serve on. Default: engine.loadTimeout + "
        "10m.",
    )
    drain_timeout: Time = implied(
        DEFAULT_DRAIN_TIMEOUT,
        "How long an engine that ends may finish its running requests: in rollouts, when scaled "
        "down, when deleted. Default: 5m.",
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        duration_within("surgeTimeout", "surge_timeout", "0s", "24h"),
        duration_within("progressDeadline", "progress_deadline", "1s", "48h"),
        duration_within("drainTimeout", "drain_timeout", "0s", "24h"),
    )


class LLMServiceSpec(PoolSpec):
    """One model, served. The fields at the top describe the serving pool."""

    replicas: StrictInt = fixed(
        1,
        "Number of replicas of the serving pool: pods, or groups of pods where nodes is above 1. "
        "`kubectl scale` and autoscalers set it.",
        ge=0,
        le=MAX_REPLICAS,
    )
    model: ModelSpec = Field(description="The model.")
    engine: EngineSpec = fixed(EngineSpec(), "The engine of both pools.")
    prefill: PoolSpec | None = implied(
        None,
        "A second pool that computes prompts for the serving pool, which then decodes. Left out, "
        "the serving pool does both.",
    )
    router: RouterSpec = implied(
        RouterSpec(), "The endpoint: a router of its own, or a shared one."
    )
    rollout: Rollout = implied(Rollout(), "How a change replaces the engines of both pools.")
    image_pull_secrets: tuple[SecretReference, ...] = implied(
        (),
        "Secrets to pull images with, for every pod of the service.",
        list_keys=("name",),
        max_length=16,
    )

    @property
    def pools(self) -> Mapping[str, PoolSpec]:
        """By name; the serving pool's fields are the service's own."""
        pools: dict[str, PoolSpec] = {SERVING_POOL: self}
        if self.prefill is not None:
            pools[PREFILL_POOL] = self.prefill
        return pools

    @property
    def progress_deadline_s(self) -> float:
        """As given, else the load limit and an allowance."""
        deadline = self.rollout.progress_deadline
        return (
            deadline.seconds
            if deadline
            else self.engine.load_timeout.seconds + (PROGRESS_ALLOWANCE_S)
        )


class LabelRequirement(SpecModel):
    """One condition on a label."""

    key: QualifiedName = Field(description="The label's key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(
        description="How the label is compared with the values."
    )
    values: tuple[LabelValue, ...] = implied(
        (), "Values for In and NotIn; none for Exists and DoesNotExist.", max_length=64
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "values",
            "selector.matchExpressions: In and NotIn need values, Exists and DoesNotExist take "
            "none",
            "(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",
            lambda condition: (condition.operator in ("In", "NotIn")) == bool(condition.values),
        ),
    )

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class LabelSelector(SpecModel):
    """Kubernetes' own selector of objects by their labels; an empty one selects everything."""

    match_labels: dict[str, LabelValue] = implied(
        {}, "Labels that an object must have, with these values.", max_length=64
    )
    match_expressions: tuple[LabelRequirement, ...] = implied(
        (), "More conditions, which must all hold.", max_length=64
    )

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels is selected."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            condition.matches(labels) for condition in self.match_expressions
        )


class ServiceWeight(SpecModel):
    """The share of one service among those that serve the same model name."""

    service: ObjectName = Field(description="Name of an LLMService behind this router.")
    weight: StrictInt = Field(
        description="Share of the model's requests against the weights of the other services of "
        "that model. 0: none.",
        ge=0,
        le=MAX_WEIGHT,
    )


class LLMRouterSpec(RouterOptions):
    """One endpoint over several services of a namespace."""

    selector: LabelSelector | None = implied(
        None,
        "Which services of the namespace are behind this router, beside those whose router.ref "
        "names it. Default: all.",
    )
    weights: tuple[ServiceWeight, ...] = implied(
        (),
        "How requests for one model name are split between services that serve it. A service that "
        f"is not listed weighs {DEFAULT_WEIGHT}.",
        list_keys=("service",),
        max_length=256,
    )


class LLMRoleScalerSpec(SpecModel):
    """The number of replicas of one pool, for autoscalers. The operator makes it."""

    service: ObjectName = Field(description="Name of the LLMService.")
    pool: Literal["prefill"] = Field(description="Name of the pool.")
    replicas: StrictInt = fixed(
        1,
        "Number of replicas of the pool. `kubectl scale` and autoscalers set it.",
        ge=0,
        le=MAX_REPLICAS,
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        never_changes(
            "service", "service: never changes; create an LLMRoleScaler for the other service"
        ),
        never_changes("pool", "pool: never changes; create an LLMRoleScaler for the other pool"),
    )
