"""The status of each custom resource, as `crd` publishes it; the operator writes it as plain data.

The API server keeps no field that is missing here, so what is written must be declared first.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StrictInt, WithJsonSchema

from kvoy_operator.spec_fields import SpecModel, implied

MAX_SERVICES: Final = 8192
"""More than the API server's limit on an object's size lets through."""
Text = Annotated[str, Field(max_length=1024)]
Moment = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]


class Condition(SpecModel):
    """One statement about the object, as Kubernetes' own kinds have them."""

    type: str = Field(description="What the condition is about, such as Ready.", max_length=316)
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(description="Why, in one word for programs.", max_length=1024)
    message: str = Field(description="Why, for people, and what to do about it.", max_length=32768)
    last_transition_time: Moment = Field(description="When the status changed last.")
    observed_generation: StrictInt | None = implied(
        None, "The metadata.generation that the condition is about.", ge=0
    )


class Status(SpecModel):
    """What every status has."""

    observed_generation: StrictInt | None = implied(
        None, "The metadata.generation that this status is about.", ge=0
    )
    conditions: tuple[Condition, ...] = implied(
        (), "Statements about the object, each of another type.", list_keys=("type",), max_length=16
    )


class PoolStatus(SpecModel):
    """One pool of a service."""

    name: Text = Field(description="serving or prefill.")
    desired: StrictInt | None = implied(None, "Replicas that are wanted.")
    ready: StrictInt | None = implied(None, "Replicas that can serve, of any revision.")
    updated: StrictInt | None = implied(None, "Replicas of the wanted revision, ready or not.")
    replicas_owner: Text | None = implied(
        None,
        "Who sets the number of replicas: this object (LLMService), or the LLMRoleScaler of the "
        "pool.",
    )
    revision: Text | None = implied(None, "Revision of most of the pool's replicas.")


class RevisionStatus(SpecModel):
    """Which revisions of the engines there are."""

    current: Text | None = implied(None, "The revision that serves.")
    update: Text | None = implied(
        None, "The revision that the spec asks for; differs from current during a rollout."
    )


class LLMServiceStatus(Status):
    """What the operator observed of the service last."""

    url: Text | None = implied(
        None, "Base URL of the OpenAI API inside the cluster, as OpenAI clients take it."
    )
    model: Text | None = implied(None, "The model's name in requests.")
    replicas: StrictInt | None = implied(None, "Replicas of the serving pool that exist.")
    selector: Annotated[str, Field(max_length=4096)] | None = implied(
        None, "Labels of the serving pool's pods, for autoscalers."
    )
    pools: tuple[PoolStatus, ...] = implied((), "The pools.", list_keys=("name",), max_length=8)
    revision: RevisionStatus | None = implied(None, "Revisions of the engines.")


class RoutedService(SpecModel):
    """A service behind a shared router."""

    name: Text = Field(description="Name of the LLMService.")
    model: Text | None = implied(None, "The model's name in requests.")
    weight: StrictInt | None = implied(
        None, "Share of the model's requests against other services of that model."
    )


class LLMRouterStatus(Status):
    """What the operator observed of the router last."""

    url: Text | None = implied(
        None, "Base URL of the OpenAI API inside the cluster, as OpenAI clients take it."
    )
    models: tuple[Text, ...] = implied(
        (), "Names of the models that can be asked for.", max_length=MAX_SERVICES
    )
    services: tuple[RoutedService, ...] = implied(
        (), "The services behind the router.", list_keys=("name",), max_length=MAX_SERVICES
    )
    replicas: StrictInt | None = implied(None, "Router pods that are wanted.")
    ready_replicas: StrictInt | None = implied(None, "Router pods that serve.")


class LLMRoleScalerStatus(Status):
    """What the operator observed of the pool last."""

    replicas: StrictInt | None = implied(None, "Replicas of the pool that exist.")
    selector: Annotated[str, Field(max_length=4096)] | None = implied(
        None, "Labels of the pool's pods, for autoscalers."
    )
