"""What needs no helm: copies are current, versions agree, values are closed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kvoy_operator.crd_schema import structural_schema
from kvoy_operator.spec_router import RouterBehavior

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "charts" / "kvoy"


def test_the_chart_carries_the_very_definitions_that_the_operator_is_made_for() -> None:
    ours = {path.name: path.read_text() for path in (ROOT / "crds").glob("*.yaml")}

    packed = {path.name: path.read_text() for path in (CHART / "definitions").glob("*.yaml")}

    assert ours, "there are no definitions"
    assert packed == ours, "run `make chart`"


def test_the_chart_installs_images_of_the_project_s_own_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["appVersion"] == chart["version"] == project["version"]


def test_every_value_is_in_the_schema_and_every_object_of_the_schema_is_closed() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    assert set(paths(values, schema)) == set(schema_paths(schema)) - {"global"}
    assert not list(open_objects(schema, ""))


def test_values_of_routers_are_what_an_llmrouter_takes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    assert schema["properties"]["routers"] == _closed(structural_schema(RouterBehavior))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema as JSON Schema, which says itself that unknown fields are refused."""
    said = {
        name: value
        for name, value in schema.items()
        if name not in ("description", "format") and not name.startswith("x-kubernetes-")
    }
    if "properties" in said:
        inner = {name: _closed(value) for name, value in said["properties"].items()}
        return {**said, "properties": inner, "additionalProperties": False}
    if "additionalProperties" in said:
        said["additionalProperties"] = _closed(said["additionalProperties"])
    return said


def paths(values: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of all values, as deep as the schema names properties."""
    for name, value in values.items():
        yield prefix + name
        inner = schema["properties"].get(name, {})
        if isinstance(value, dict) and "properties" in inner and not is_pass_through(prefix + name):
            yield from paths(value, inner, f"{prefix}{name}.")


def schema_paths(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, inner in schema["properties"].items():
        yield prefix + name
        if "properties" in inner and not is_pass_through(prefix + name):
            yield from schema_paths(inner, f"{prefix}{name}.")


def is_pass_through(path: str) -> bool:
    """Whether it is passed on as it is; its fields are not the chart's own, and may be left out."""
    return path in (
        "operator.resources",
        "operator.affinity",
        "routers.flowControl",
        "routers.failover",
        "routers.timeouts",
    )


def open_objects(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Objects that would take any field."""
    if "properties" in schema and schema.get("additionalProperties") is not False:
        yield path
    for name, inner in schema.get("properties", {}).items():
        yield from open_objects(inner, f"{path}.{name}")
    if isinstance(items := schema.get("items"), dict):
        yield from open_objects(items, f"{path}[]")
