"""A pydantic model as the structural OpenAPI schema that the API server takes.

Pydantic's JSON schema is close: what is left is to put definitions where they are used, to turn
"this or null" into "this", to keep only defaults that never change, and to drop what OpenAPI 3.0
does not know. Pure.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from kvoy_operator.spec_fields import IMPLIED

Schema = dict[str, Any]

_DROPPED: Final = ("title", "additionalProperties", "$defs")
_INT_OR_STRING: Final = "x-kubernetes-int-or-string"


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        """A part's default is empty: the API server fills in what is fixed inside."""
        return {} if isinstance(dft, BaseModel) else dft


def structural_schema(model: type[BaseModel]) -> Schema:
    """The model's schema, every definition in its place."""
    schema = model.model_json_schema(by_alias=True, mode="validation", schema_generator=_Generator)
    return _structural(schema, schema.get("$defs", {}))


def _structural(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    schema = _in_place(schema, definitions)
    is_int_or_string = _INT_OR_STRING in schema
    result = {key: value for key, value in schema.items() if key not in _DROPPED}
    if result.pop(IMPLIED, False):
        result.pop("default", None)
    if "properties" in schema:
        result["properties"] = {
            name: _structural(inner, definitions) for name, inner in schema["properties"].items()
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        values = _structural(schema["additionalProperties"], definitions)
        result["additionalProperties"] = values
    if "items" in schema:
        result["items"] = _structural(schema["items"], definitions)
        result.setdefault("x-kubernetes-list-type", "atomic")
    if schema.get("type") == "integer" and not is_int_or_string:
        result["format"] = "int64" if schema.get("maximum", 2**31) >= 2**31 else "int32"
    if schema.get("type") == "number":
        result["format"] = "double"
    if "const" in schema:
        result["enum"] = [result.pop("const")]
    return _ordered(result)


def _in_place(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """The schema with what it refers to, and without the choice of null."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        outer = {key: value for key, value in schema.items() if key != "$ref"}
        return _in_place({**target, **outer}, definitions)
    if "anyOf" in schema and _INT_OR_STRING not in schema:
        choices = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
        if len(choices) != 1:
            raise ValueError(f"a structural schema has no choice of types: {schema}")
        outer = {key: value for key, value in schema.items() if key != "anyOf"}
        return _in_place({**choices[0], **outer}, definitions)
    return schema


def _ordered(schema: Schema) -> Schema:
    """What people look for first comes first; fields keep the model's order."""
    first = ("description", "type", "format", "enum", "default", "required", "properties")
    keys = [key for key in first if key in schema] + sorted(schema.keys() - set(first))
    return {key: schema[key] for key in keys}
