"""`python -m kvoy_operator.crd [--check] DIR`: the CustomResourceDefinitions of the typed specs.

Writes one file per kind into DIR; with --check it only tells whether the files there are current.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel

from kvoy_contract.names import API_GROUP, API_VERSION
from kvoy_operator.cel_rules import Rule
from kvoy_operator.crd_schema import structural_schema
from kvoy_operator.resources import NAME_RULES, ROUTER_KIND, SCALER_KIND, SERVICE_KIND
from kvoy_operator.spec import LLMRoleScalerSpec, LLMRouterSpec, LLMServiceSpec
from kvoy_operator.spec_status import LLMRoleScalerStatus, LLMRouterStatus, LLMServiceStatus

USAGE: Final = "usage: python -m kvoy_operator.crd [--check] DIR"
HEADER: Final = "# Made by `make crds` from operator/kvoy_operator/spec.py; do not edit.\n"
LINE_WIDTH: Final = 100


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `kubectl get`; one of lower priority shows with `-o wide`."""

    name: str
    path: str
    type: str = "string"
    description: str = ""
    is_wide: bool = False

    def to_manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = {"name": self.name, "type": self.type, "jsonPath": self.path}
        if self.description:
            manifest["description"] = self.description
        return {**manifest, "priority": 1} if self.is_wide else manifest


@dataclass(frozen=True, slots=True)
class Definition:
    kind: str
    short_names: tuple[str, ...]
    description: str
    spec: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...] = ()
    has_scale: bool = False
    categories: tuple[str, ...] = field(default=("inference",))

    @property
    def plural(self) -> str:
        return f"{self.kind.lower()}s"

    @property
    def file_name(self) -> str:
        return f"{self.plural}.{API_GROUP}.yaml"


def _condition(kind: str, part: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{part}'


def _ready_of(pool: str) -> str:
    return f'.status.pools[?(@.name=="{pool}")].ready'


_READY: Final = (
    Column("Ready", _condition("Ready", "status"), description="Whether it can serve."),
    Column("Reason", _condition("Ready", "reason"), description="Why, or why not."),
)
_URL: Final = Column("URL", ".status.url", description="Base URL for OpenAI clients.")
_AGE: Final = Column("Age", ".metadata.creationTimestamp", "date")

DEFINITIONS: Final = (
    Definition(
        SERVICE_KIND,
        ("llm",),
        "One model served behind an OpenAI API: engines in a serving pool, an optional prefill "
        "pool, and a router of its own or a shared one.",
        LLMServiceSpec,
        LLMServiceStatus,
        (
            Column("Model", ".status.model", description="The model's name in requests."),
            *_READY,
            _URL,
            Column("Serving", _ready_of("serving"), "integer", "Replicas that serve.", True),
            Column("Prefill", _ready_of("prefill"), "integer", "Replicas that prefill.", True),
            Column("Engine", ".spec.engine.kind", is_wide=True),
            _AGE,
        ),
        NAME_RULES,
        has_scale=True,
    ),
    Definition(
        ROUTER_KIND,
        ("llmr",),
        "One OpenAI endpoint over several LLMServices of a namespace.",
        LLMRouterSpec,
        LLMRouterStatus,
        (*_READY, _URL, _AGE),
        NAME_RULES,
    ),
    Definition(
        SCALER_KIND,
        ("llms",),
        "The number of replicas of a service's prefill pool, for autoscalers; the operator makes "
        "it.",
        LLMRoleScalerSpec,
        LLMRoleScalerStatus,
        (
            Column("Service", ".spec.service"),
            Column("Pool", ".spec.pool"),
            Column("Desired", ".spec.replicas", "integer", "Replicas that are wanted."),
            Column("Replicas", ".status.replicas", "integer", "Replicas that exist."),
            _AGE,
        ),
        has_scale=True,
    ),
)


def render_crd(definition: Definition) -> dict[str, Any]:
    """The CustomResourceDefinition as plain data."""
    names = {
        "kind": definition.kind,
        "listKind": f"{definition.kind}List",
        "plural": definition.plural,
        "singular": definition.kind.lower(),
        "shortNames": list(definition.short_names),
        "categories": list(definition.categories),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{definition.plural}.{API_GROUP}"},
        "spec": {
            "group": API_GROUP,
            "names": names,
            "scope": "Namespaced",
            "versions": [_version(definition)],
        },
    }


def _version(definition: Definition) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if definition.has_scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "name": API_VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [column.to_manifest() for column in definition.columns],
        "subresources": subresources,
        "schema": {"openAPIV3Schema": _object_schema(definition)},
    }


def _object_schema(definition: Definition) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "description": definition.description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(definition.spec),
            "status": structural_schema(definition.status),
        },
    }
    if definition.rules:
        schema["x-kubernetes-validations"] = [rule.to_schema() for rule in definition.rules]
    return schema


def render_file(definition: Definition) -> str:
    """The text of the definition's file."""
    manifest = render_crd(definition)
    return HEADER + yaml.dump(
        manifest, Dumper=_PlainDumper, sort_keys=False, width=LINE_WIDTH, allow_unicode=True
    )


class _PlainDumper(yaml.SafeDumper):
    """Without anchors: every occurrence of a shared part is written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def main(argv: Sequence[str]) -> int:
    arguments = list(argv)
    is_check = "--check" in arguments
    folders = [argument for argument in arguments if argument != "--check"]
    if len(folders) != 1 or folders[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    files = {Path(folders[0]) / d.file_name: render_file(d) for d in DEFINITIONS}
    if is_check:
        return _report_stale(files)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


def _report_stale(files: dict[Path, str]) -> int:
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path} is not what the specs say: run `make crds`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
