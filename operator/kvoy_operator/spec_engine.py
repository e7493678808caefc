"""`spec.engine`: the program in the pods of both pools, and its container."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from kvoy_operator.cel_rules import Rule, duration_within
from kvoy_operator.durations import Duration
from kvoy_operator.spec_fields import (
    ObjectName,
    PodTemplate,
    QualifiedName,
    Quantity,
    SpecModel,
    Time,
    fixed,
    implied,
)

MIN_KV_CACHE_FRACTION: Final = 0.01
DEFAULT_LOAD_TIMEOUT: Final = Duration("30m")

_OPERATOR_FLAGS: Final = (
    "host|port|telemetry-port|served-model-name|secret|expect-router|role|runner|nnodes|node-rank"
    "|master-addr|master-port|tensor-parallel-size|pipeline-parallel-size|drain-timeout-s"
)
_FIELD_FLAGS: Final = "max-model-len|gpu-memory-utilization"
Argument = Annotated[str, Field(max_length=4096)]
_OPERATOR_ENV: Final = "KVOY_SECRET|LWS_[A-Z_]*"


class FieldSelector(SpecModel):
    """A field of the pod."""

    field_path: str = Field(
        description="Path of the field, such as metadata.name or status.podIP.", max_length=512
    )
    api_version: str | None = implied(
        None, "API version that the path is written in. Default: v1.", max_length=64
    )


class ResourceSelector(SpecModel):
    """A request or limit of a container."""

    resource: QualifiedName = Field(description="What to read, such as limits.memory.")
    container_name: ObjectName | None = implied(
        None, "Container to read it of. Default: the engine's."
    )
    divisor: Quantity | None = implied(None, "Unit of the value. Default: 1.")


class KeySelector(SpecModel):
    """One key of a ConfigMap or Secret in the same namespace."""

    name: ObjectName = Field(description="Name of the ConfigMap or Secret.")
    key: str = Field(description="The key.", min_length=1, max_length=253)
    optional: StrictBool | None = implied(
        None, "Whether the pod may start without it, then without the variable. Default: false."
    )


class FileKeySelector(SpecModel):
    """One variable of a file with variables."""

    volume_name: ObjectName = Field(description="Name of the volume that holds the file.")
    path: str = Field(description="Path of the file in the volume.", min_length=1, max_length=1024)
    key: str = Field(description="The variable in the file.", min_length=1, max_length=253)
    optional: StrictBool | None = implied(
        None, "Whether the pod may start without it, then without the variable. Default: false."
    )


class EnvVarSource(SpecModel):
    """Where an environment variable's value comes from; exactly one of its fields."""

    field_ref: FieldSelector | None = implied(None, "A field of the pod.")
    resource_field_ref: ResourceSelector | None = implied(
        None, "A request or limit of a container."
    )
    config_map_key_ref: KeySelector | None = implied(None, "A key of a ConfigMap.")
    secret_key_ref: KeySelector | None = implied(None, "A key of a Secret.")
    file_key_ref: FileKeySelector | None = implied(
        None, "A variable of a file in a volume, where the cluster has the feature EnvFiles."
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "",
            "engine.env: valueFrom needs exactly one of fieldRef, resourceFieldRef, "
            "configMapKeyRef, secretKeyRef and fileKeyRef",
            "[has(self.fieldRef), has(self.resourceFieldRef), has(self.configMapKeyRef), "
            "has(self.secretKeyRef), has(self.fileKeyRef)].filter(x, x).size() == 1",
            lambda source: [value for _, value in source].count(None) == 4,
        ),
    )


class EnvVar(SpecModel):
    """An environment variable, as in a pod."""

    name: str = Field(description="Name of the variable.", min_length=1, max_length=256)
    value: str | None = implied(
        None, "Value; $(NAME) stands for another variable's. Default: empty.", max_length=32768
    )
    value_from: EnvVarSource | None = implied(None, "Takes the value from elsewhere instead.")
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "",
            "engine.env: give either value or valueFrom, not both",
            "!has(self.value) || self.value == '' || !has(self.valueFrom)",
            lambda env: not env.value or env.value_from is None,
        ),
        Rule(
            "name",
            "engine.env: the operator sets KVOY_SECRET, and LeaderWorkerSet sets LWS_...; remove "
            "it or choose another name",
            f"!self.name.matches('^({_OPERATOR_ENV})$')",
            lambda env: re.fullmatch(_OPERATOR_ENV, env.name) is None,
        ),
    )


def _has_no_flag(flags: str, message: str) -> Rule:
    pattern = re.compile(f"^--({flags})(=|$)")
    return Rule(
        "args",
        message,
        f"!has(self.args) || !self.args.exists(a, a.matches('{pattern.pattern}'))",
        lambda engine: not any(pattern.search(arg) for arg in engine.args),
    )


class EngineSpec(SpecModel):
    """The engine of both pools."""

    kind: Literal["native", "sim"] = fixed(
        "native",
        "Which engine: native runs the model; sim answers after a timing model, without a model "
        "and without GPUs, to try a cluster or to test.",
    )
    image: str | None = implied(
        None,
        "Container image. Default: the operator's image for this kind, for CUDA when gpus is "
        "above 0.",
        min_length=1,
        max_length=1024,
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = implied(
        None, "When to pull the image. Default: the operator's setting, IfNotPresent unless told."
    )
    args: tuple[Argument, ...] = implied(
        (),
        "More arguments of `kvoy serve`, after those of the operator.",
        max_length=128,
    )
    env: tuple[EnvVar, ...] = implied(
        (),
        "More environment variables of the engine, as in a pod.",
        list_keys=("name",),
        max_length=128,
    )
    max_model_len: StrictInt | None = implied(
        None,
        "Most tokens of a prompt together with its completion. Default: the model's own limit.",
        ge=1,
        le=100_000_000,
    )
    kv_cache_fraction: StrictFloat | None = implied(
        None,
        "Share of a GPU's memory for weights and KV cache together (vLLM's "
        "--gpu-memory-utilization). Default: the engine's own, 0.9.",
        ge=0,
        le=1,
    )
    load_timeout: Time = implied(
        DEFAULT_LOAD_TIMEOUT,
        "Time from a container's start until the model is loaded, downloads in it included; an "
        "engine that takes longer is started again. Default: 30m.",
    )
    pod_template: PodTemplate | None = implied(
        None,
        "A patch of every engine pod of both pools, before the pool's own podTemplate; the "
        "engine's container is named engine. For tolerations, nodeSelector, affinity, volumes, "
        "sidecars and whatever else a pod has.",
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        _has_no_flag(
            _OPERATOR_FLAGS,
            "engine.args: the operator sets this flag itself, from the name, ports, role, nodes, "
            "parallelism and rollout.drainTimeout; remove it",
        ),
        _has_no_flag(
            _FIELD_FLAGS,
            "engine.args: set engine.maxModelLen or engine.kvCacheFraction instead of the flag",
        ),
        Rule(
            "kvCacheFraction",
            "engine.kvCacheFraction: must be from 0.01 to 1",
            # The API server compares a whole number with the whole part of a limit: 0 would pass.
            f"!has(self.kvCacheFraction) || self.kvCacheFraction >= {MIN_KV_CACHE_FRACTION}",
            lambda engine: (
                engine.kv_cache_fraction is None
                or engine.kv_cache_fraction >= MIN_KV_CACHE_FRACTION
            ),
        ),
        duration_within("loadTimeout", "load_timeout", "1s", "24h"),
    )
