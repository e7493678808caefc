"""Custom resources as they come from the API server, read into typed values.

Called for each watched object; raises InvalidSpec for what the operator cannot serve.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvoy_operator.cel_rules import Rule
from kvoy_operator.errors import InvalidSpec
from kvoy_operator.spec import LLMRoleScalerSpec, LLMRouterSpec, LLMServiceSpec
from kvoy_operator.spec_fields import SpecModel
from kvoy_operator.spec_router import RouterBehavior

SERVICE_KIND: Final = "LLMService"
ROUTER_KIND: Final = "LLMRouter"
SCALER_KIND: Final = "LLMRoleScaler"

MAX_NAME_LENGTH: Final = 40
_NAME_PATTERN: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

S = TypeVar("S", bound=SpecModel)


@dataclass(frozen=True, slots=True)
class Resource(Generic[S]):
    """A custom resource. `status` is plain data, as last written."""

    kind: str
    namespace: str
    name: str
    uid: str
    generation: int
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: S
    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LLMService(Resource[LLMServiceSpec]):
    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self.spec.model.name or self.name


@dataclass(frozen=True, slots=True)
class LLMRouter(Resource[LLMRouterSpec]):
    pass


@dataclass(frozen=True, slots=True)
class LLMRoleScaler(Resource[LLMRoleScalerSpec]):
    pass


NAME_RULES: Final = (
    Rule(
        "metadata",
        f"metadata.name: at most {MAX_NAME_LENGTH} characters, since names of pods and Services "
        "are made from it",
        f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
        lambda name: len(name) <= MAX_NAME_LENGTH,
    ),
    Rule(
        "metadata",
        "metadata.name: lower-case letters, digits and '-', beginning with a letter and not ending "
        "with '-', since a Service gets this name",
        f"self.metadata.name.matches('{_NAME_PATTERN}')",
        lambda name: re.search(_NAME_PATTERN, name) is not None,
    ),
)
"""Of services and routers, whose names become those of Services. `holds` takes the name. (A schema
cannot point at `metadata.name`, only at `metadata`.)"""


def parse_service(body: Mapping[str, Any]) -> LLMService:
    """Raises InvalidSpec."""
    _check_name(body)
    return LLMService(**_common(body), spec=_parse_spec(LLMServiceSpec, body))


def parse_router(body: Mapping[str, Any]) -> LLMRouter:
    """Raises InvalidSpec."""
    _check_name(body)
    return LLMRouter(**_common(body), spec=_parse_spec(LLMRouterSpec, body))


def parse_scaler(body: Mapping[str, Any]) -> LLMRoleScaler:
    """Raises InvalidSpec."""
    return LLMRoleScaler(**_common(body), spec=_parse_spec(LLMRoleScalerSpec, body))


def _check_name(body: Mapping[str, Any]) -> None:
    for rule in NAME_RULES:
        if rule.holds is not None and not rule.holds(body["metadata"]["name"]):
            raise InvalidSpec("metadata.name", _without_field(rule.message))


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    metadata = body["metadata"]
    return {
        "kind": body["kind"],
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "generation": metadata["generation"],
        "labels": metadata.get("labels") or {},
        "annotations": metadata.get("annotations") or {},
        "status": body.get("status") or {},
    }


def _parse_spec(model: type[S], body: Mapping[str, Any]) -> S:
    try:
        return model.model_validate(body.get("spec") or {})
    except ValidationError as error:
        raise _to_invalid_spec(error.errors(include_url=False)[0], "spec") from None


def parse_router_defaults(document: object) -> RouterBehavior:
    """What the operator sets for all routers, in the form of their specs. Raises InvalidSpec."""
    try:
        return RouterBehavior.model_validate(document)
    except ValidationError as error:
        raise _to_invalid_spec(error.errors(include_url=False)[0]) from None


def _to_invalid_spec(error: ErrorDetails, *roots: str) -> InvalidSpec:
    parts = [*roots, *(str(part) for part in error["loc"])]
    if error["type"] == "rule":
        path = ".".join([*parts, *filter(None, [error["ctx"]["field"]])])
        return InvalidSpec(path, _without_field(error["msg"]))
    if error["type"] == "extra_forbidden":
        return InvalidSpec(".".join(parts), "no such field; remove it or correct its name")
    if error["type"] == "value_error":
        return InvalidSpec(".".join(parts), str(error["ctx"]["error"]))
    return InvalidSpec(".".join(parts), error["msg"])


def _without_field(message: str) -> str:
    """A rule's message begins with the field's name, since the API server shows it alone."""
    return message.partition(": ")[2]
