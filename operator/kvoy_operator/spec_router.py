"""A router in the custom resources: its size, who may use it, and what it does under load and when
engines fail.

What flow control, failover and timeouts mean is told in docs/flow-control.md and docs/failures.md;
`manifests.router_config` turns them into the router's own configuration.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, StrictFloat, StrictInt

from kvoy_operator.cel_rules import Rule, duration_within
from kvoy_operator.spec_fields import (
    ObjectName,
    PodTemplate,
    Resources,
    SecretReference,
    SpecModel,
    Time,
    fixed,
    implied,
)

DEFAULT_ROUTER_REPLICAS: Final = 2
DEFAULT_POLICY: Final = "kv-aware"
MAX_REQUESTS: Final = 1_000_000
"""That any bound of a queue may allow."""
MIN_AGED_SHARE: Final = 0.01


class KeysSecret(SpecModel):
    """A Secret of API keys in the same namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: str = fixed(
        "keys.yaml",
        "Key of the Secret that holds the keys file.",
        pattern=r"^[-._A-Za-z0-9]+$",
        min_length=1,
        max_length=253,
    )


class FlowControl(SpecModel):
    """When a request goes on to an engine, and how many may wait until then. For each router pod by
    itself."""

    max_waiting: StrictInt | None = implied(
        None,
        "Requests of one model that wait for room; 429 beyond. 0: none waits. Default: 8192.",
        ge=0,
        le=MAX_REQUESTS,
    )
    max_waiting_per_tenant: StrictInt | None = implied(
        None, "Of these, those of one tenant. Default: 8192.", ge=0, le=MAX_REQUESTS
    )
    max_waiting_per_priority: StrictInt | None = implied(
        None, "Of these, those of one priority. Default: 8192.", ge=0, le=MAX_REQUESTS
    )
    max_wait: Time | None = implied(
        None, "How long a request waits for room; then 429. Default: 5m."
    )
    max_engine_wait: Time | None = implied(
        None,
        "A request goes on while some engine would begin with it within this time, and waits in "
        "the router while none would. Default: 1s.",
    )
    shared_wait: StrictFloat | None = implied(
        None,
        "Share of maxEngineWait for tenants that use more than the others, and for requests less "
        "important than some that are being served: the rest is kept free for the others. "
        "Default: 0.2.",
        ge=0,
        le=1,
    )
    age_after: Time | None = implied(
        None,
        "A less important request that has waited so long gets its part of agedShare although more "
        "important ones wait. Default: 5s.",
    )
    aged_share: StrictFloat | None = implied(
        None, "That share of all tokens. Default: 0.125.", ge=0, le=1
    )
    max_held: StrictInt | None = implied(
        None,
        "Requests that wait for the first engine of a model, as while a pool starts from nothing; "
        "503 beyond. Default: 256.",
        ge=0,
        le=MAX_REQUESTS,
    )
    max_hold: Time | None = implied(
        None, "How long they wait; then 503. 0s: not at all. Default: 10s."
    )
    objectives: dict[str, Annotated[StrictInt, Field(ge=-1000, le=1000)]] | None = implied(
        None,
        "Priorities, lower first, of the objectives that requests without API keys name in the "
        "header x-llm-d-inference-objective. Others have 0.",
        max_length=64,
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        duration_within("maxWait", "max_wait", "1ms", "24h"),
        duration_within("maxEngineWait", "max_engine_wait", "1ms", "10m"),
        duration_within("ageAfter", "age_after", "0s", "24h"),
        duration_within("maxHold", "max_hold", "0s", "24h"),
        Rule(
            "agedShare",
            f"agedShare: must be from {MIN_AGED_SHARE} to 1, or less important requests could wait "
            "for ever",
            # The API server compares a whole number with the whole part of a limit: 0 would pass.
            f"!has(self.agedShare) || self.agedShare >= {MIN_AGED_SHARE}",
            lambda flow: flow.aged_share is None or flow.aged_share >= MIN_AGED_SHARE,
        ),
        Rule(
            "objectives",
            "objectives: an objective needs a name",
            "!has(self.objectives) || !('' in self.objectives)",
            lambda flow: "" not in (flow.objectives or {}),
        ),
    )


class Failover(SpecModel):
    """What a router does when an engine fails. For each router pod by itself."""

    max_retries: StrictInt | None = implied(
        None,
        "Further engines to try when one fails before the client has seen anything. Default: 2.",
        ge=0,
        le=100,
    )
    max_resumes: StrictInt | None = implied(
        None,
        "Further engines that may go on with a stream whose engine has died or hangs. 0: the "
        "client is told. Default: 2.",
        ge=0,
        le=100,
    )
    hang_timeout: Time | None = implied(
        None,
        "An engine without a heartbeat for so long hangs, and its requests go to another one; also "
        "the least that a step may take. Heartbeats come each second. Default: 3s.",
    )
    retry_share: StrictFloat | None = implied(
        None,
        "Retries, and likewise resumes, for each request: they stay this share of the traffic. "
        "Default: 0.2.",
        ge=0,
        le=1,
    )
    retry_burst: StrictInt | None = implied(
        None,
        "Retries, and likewise resumes, at once, as after the loss of an engine with all its "
        "requests. Default: 1024.",
        ge=0,
        le=MAX_REQUESTS,
    )
    breaker_failures: StrictInt | None = implied(
        None,
        "Failures in a row after which an engine gets nothing for a while. 0: it always does. "
        "Default: 3.",
        ge=0,
        le=1000,
    )
    breaker_pause: Time | None = implied(
        None,
        "Until such an engine is tried again; doubled each time, up to 30 s. Default: 1s.",
    )
    hedge: Literal["None", "Observed", "Fixed"] | None = implied(
        None,
        "Whether a second engine is asked too for a stream that begins late, within the budget of "
        "retries. Observed: later than predicted by more than nearly all others were. Fixed: after "
        "hedgeAfter. Default: None.",
    )
    hedge_after: Time | None = implied(
        None, "When a stream is late with Fixed; with Observed, at the earliest. Default: 1s."
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        duration_within("hedgeAfter", "hedge_after", "10ms", "10m"),
        duration_within("hangTimeout", "hang_timeout", "2s", "10m"),
        duration_within("breakerPause", "breaker_pause", "10ms", "30s"),
    )


class Timeouts(SpecModel):
    """How long the parts of a request may take."""

    request: Time | None = implied(
        None,
        "A request as a whole, waiting included; then 504, or an error event in its stream. A "
        "router that is replaced gives its streams as long, and 10 minutes at least. Default: 10m.",
    )
    connect: Time | None = implied(None, "To connect to an engine. Default: 2s.")
    first_byte: Time | None = implied(
        None, "Until an engine begins to stream: its queue and its prefill. Default: 5m."
    )
    whole_answer: Time | None = implied(
        None, "Until an engine has an answer that is not streamed. Default: 10m."
    )
    idle: Time | None = implied(None, "Silence within an engine's answer. Default: 1m.")
    rules: ClassVar[tuple[Rule, ...]] = (
        duration_within("request", "request", "1s", "24h"),
        duration_within("connect", "connect", "10ms", "5m"),
        duration_within("firstByte", "first_byte", "100ms", "24h"),
        duration_within("wholeAnswer", "whole_answer", "100ms", "24h"),
        duration_within("idle", "idle", "100ms", "24h"),
    )


class RouterBehavior(SpecModel):
    """What a router does with requests. It takes changes of this over while it runs."""

    flow_control: FlowControl = implied(
        FlowControl(), "When a request goes on to an engine, and how many may wait until then."
    )
    failover: Failover = implied(Failover(), "What the router does when an engine fails.")
    timeouts: Timeouts = implied(Timeouts(), "How long the parts of a request may take.")


class RouterOptions(RouterBehavior):
    """A router: the endpoint that clients talk to."""

    replicas: StrictInt = implied(
        DEFAULT_ROUTER_REPLICAS, "Number of router pods. Default: 2.", ge=1, le=100
    )
    policy: Literal["kv-aware", "least-load", "round-robin"] = implied(
        DEFAULT_POLICY,
        "How an engine is chosen: kv-aware weighs load against the prompt's part that an engine "
        "holds already; least-load looks at load alone; round-robin takes turns. Default: "
        "kv-aware.",
    )
    api_keys_secret_ref: KeysSecret | None = implied(
        None,
        "Secret with a keys file (see `kvoy router key new`): every request then needs one of its "
        "keys. A change of it holds within a minute or two, without a new pod. Default: no keys "
        "are asked for.",
    )
    tls_secret_ref: SecretReference | None = implied(
        None,
        "Secret of type kubernetes.io/tls with the endpoint's certificate: the endpoint is then "
        "https, on port 443 alone. A renewed certificate is followed without a new pod. Default: "
        "http, on port 80.",
    )
    resources: Resources = implied(
        Resources(), "CPU and memory of the router's container. Default: the operator's."
    )
    pod_template: PodTemplate | None = implied(
        None, "A patch of the router's pods; their container is named router."
    )


def _own_settings() -> tuple[str, ...]:
    return tuple(field.alias or name for name, field in RouterOptions.model_fields.items())


class RouterSpec(RouterOptions):
    """The router of one service, or the shared one that serves it."""

    ref: ObjectName | None = implied(
        None,
        "Name of an LLMRouter in the same namespace that serves this service. Default: the service "
        "has a router of its own.",
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "ref",
            "router.ref: the shared router has settings of its own; remove all others here and set "
            "them on the LLMRouter",
            "!has(self.ref) || "
            + " && ".join(f"!has(self.{name})" for name in sorted(_own_settings())),
            lambda router: router.ref is None or router.model_fields_set <= {"ref"},
        ),
    )
