"""What the custom resources' fields are made of: the base model, and types with their limits.

A default stands in the schema only when it will never change, since the API server then stores it
in every object. One that may get better (a time limit, a size) is `implied`: the description states
it and the operator fills it in, so that an object in a cluster does not freeze it.

Knows no particular field. `crd` turns the models into schemas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError

from kvoy_operator.cel_rules import Rule
from kvoy_operator.durations import DURATION_PATTERN, MAX_DURATION_LENGTH, Duration
from kvoy_operator.quantities import MAX_QUANTITY_LENGTH, QUANTITY_PATTERN, parse_quantity

IMPLIED: Final = "x-implied-default"
"""Marks, inside this program only, a default that stays out of the schema."""
NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
LABEL_VALUE_PATTERN: Final = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
QUALIFIED_NAME_PATTERN: Final = (
    r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
)


class SpecModel(BaseModel):
    """A part of a custom resource: frozen, camelCase in YAML, refusing what it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        if cls.rules:
            schema["x-kubernetes-validations"] = [rule.to_schema() for rule in cls.rules]
        return schema

    @model_validator(mode="after")
    def _keep_rules(self) -> SpecModel:
        for rule in self.rules:
            if rule.holds is not None and not rule.holds(self):
                context = {"field": rule.field, "message": rule.message}
                raise PydanticCustomError("rule", "{message}", context)
        return self


def fixed(default: Any, description: str, **limits: Any) -> Any:
    """A field whose default stands in the schema and never changes."""
    return Field(default, description=description, **limits)


def implied(default: Any, description: str, *, list_keys: Sequence[str] = (), **limits: Any) -> Any:
    """An optional field without a default in the schema; `default` is what the operator takes.

    `list_keys` are fields of a list's elements that tell them apart: two appliers may then own
    different elements, and no two elements may be alike in them.
    """
    extra: dict[str, Any] = {IMPLIED: True}
    if list_keys:
        extra |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(list_keys)}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def _is_mapping_of_text(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        text is None or isinstance(text, str) for text in value.values()
    )


def _check_pod_template(patch: dict[str, Any]) -> dict[str, Any]:
    for key in sorted(patch.keys() - {"metadata", "spec"}):
        raise ValueError(f"{key} is no part of a pod template: metadata and spec are")
    metadata = patch.get("metadata") or {}
    for key in sorted(metadata.keys() - {"labels", "annotations"}):
        raise ValueError(f"metadata.{key} cannot be patched: only labels and annotations can")
    for key, value in sorted(metadata.items()):
        if not _is_mapping_of_text(value):
            raise ValueError(f"metadata.{key} must map names to text")
    return patch


def _text_map_schema(description: str, max_length: int) -> dict[str, Any]:
    text = {"type": "string", "maxLength": max_length, "nullable": True}
    return {
        "type": "object",
        "description": description,
        "additionalProperties": text,
        "maxProperties": 64,
    }


_POD_TEMPLATE_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "metadata": {
            "type": "object",
            "description": "Labels and annotations to add to the pods.",
            "properties": {
                "labels": _text_map_schema(
                    "Labels to add. Those of kvoy.dev and app.kubernetes.io stay as they are.", 63
                ),
                "annotations": _text_map_schema("Annotations to add.", 65536),
            },
        },
        "spec": {
            "type": "object",
            "description": "A strategic-merge patch of the pod's spec, as `kubectl patch` takes "
            "it: containers, volumes, env and the like merge by name, null removes a field, "
            "`$patch: delete` removes an element.",
            "x-kubernetes-preserve-unknown-fields": True,
        },
    },
}


def _read_duration(value: object) -> Duration:
    if not isinstance(value, str):
        raise ValueError("must be text such as 90s, 30m or 1h30m")
    return Duration(value)


ObjectName = Annotated[str, Field(pattern=NAME_PATTERN, min_length=1, max_length=253)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE_PATTERN, max_length=63)]
QualifiedName = Annotated[str, Field(pattern=QUALIFIED_NAME_PATTERN, min_length=1, max_length=317)]
"""A label's or a resource's name, with or without a domain before it."""
Time = Annotated[
    Duration,
    PlainValidator(_read_duration),
    WithJsonSchema(
        {"type": "string", "pattern": DURATION_PATTERN, "maxLength": MAX_DURATION_LENGTH}
    ),
]
"""A duration; see `durations`."""


def _check_quantity(quantity: str) -> str:
    parse_quantity(quantity)
    return quantity


def _text_of_number(value: object) -> object:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else value


Quantity = Annotated[
    str,
    BeforeValidator(_text_of_number),
    AfterValidator(_check_quantity),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY_PATTERN,
            "maxLength": MAX_QUANTITY_LENGTH,
        }
    ),
]
"""A Kubernetes quantity as text, whether it was written as text or as a number."""
PodTemplate = Annotated[
    dict[str, Any],
    AfterValidator(_check_pod_template),
    WithJsonSchema(_POD_TEMPLATE_SCHEMA),
]
"""A strategic-merge patch of a pod template, as plain data; see `pod_patch`."""


class Resources(SpecModel):
    """What a container asks for and may use, as in a pod."""

    requests: dict[str, Quantity] = implied(
        {},
        "What the scheduler sets aside for one pod: cpu, memory, ephemeral-storage, ...",
        max_length=32,
    )
    limits: dict[str, Quantity] = implied(
        {}, "What one pod may use at most. Memory includes what lies in /dev/shm.", max_length=32
    )


class SecretReference(SpecModel):
    """The name of a Secret in the same namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
