"""Scenario files say what is wrong and where; what they leave out has the fleet's own defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvoy_engine.timing_model import TimingModel
from kvoy_simulate.scenario import EngineDies, EngineGroup, Scenario, TelemetryLost, Ways
from kvoy_simulate.scenario_file import (
    ScenarioError,
    ScenarioFile,
    find_scenario,
    parse_scenario,
    read_scenario,
    shipped_scenarios,
)

GOOD = """
summary: two engines
engines:
  - name: engine
    count: 2
    core: {num_blocks: 1000, max_model_len: 4096}
workload:
  kind: independent
  arrivals: {rate: 5}
duration_s: 10
events:
  - {kind: engine-dies, at_s: 3, engine: engine-1, restart_after_s: 2}
  - {kind: telemetry-lost, at_s: 4, for_s: 1, routers: [0]}
"""


def test_a_file_becomes_a_scenario_with_the_fleets_defaults() -> None:
    scenario = parse_scenario(GOOD, "good.yaml").scenario()

    assert isinstance(scenario, Scenario)
    (group,) = scenario.engines
    assert isinstance(group, EngineGroup)
    assert (group.count, group.core.num_blocks, group.core.block_size) == (2, 1000, 16)
    assert group.step == TimingModel()
    assert scenario.ways == Ways()
    assert scenario.events == (
        EngineDies(at_s=3.0, engine="engine-1", restart_after_s=2.0),
        TelemetryLost(at_s=4.0, for_s=1.0, routers=(0,)),
    )
    assert next(iter(scenario.workload(0).start())).arrival_s > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count: 2", "cuont: 2", r"unknown field `cuont` - at `\$\.engines\[0\]`"),
        ("num_blocks: 1000", "num_blocks: 0", r"num_blocks must be at least 1.*\.core`"),
        ("num_blocks: 1000, ", "", r"missing required field `num_blocks`"),
        ("rate: 5", "rate: 0", r"rate must be above 0.*\$\.workload\.arrivals"),
        ("rate: 5", "rate: often", r"Expected `float`, got `str` - at `\$\.workload\.arrivals"),
        ("kind: independent", "kind: other", r"Invalid value 'other' - at `\$\.workload\.kind`"),
        ("arrivals: {rate: 5}", "arrivals: {rate: 5}\n  size: 3", r"unknown field `size`"),
        ("kind: engine-dies", "kind: engine-falls", r"Invalid value 'engine-falls'"),
        ("at_s: 3,", "at_s: 3, for_s: 1,", r"unknown field `for_s` - at `\$\.events\[0\]`"),
        ("duration_s: 10", "duration_s: 10\nwarmup_s: 10", r"warmup_s must be below duration_s 10"),
        ("duration_s: 10", "duration_s: -1", r"duration_s"),
        ("summary: two engines\n", "", r"missing required field `summary`"),
        ("summary: two", "summary: [two", r"not YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(old: str, new: str, message: str) -> None:
    assert old in GOOD

    with pytest.raises(ScenarioError, match=message) as error:
        parse_scenario(GOOD.replace(old, new), "bad.yaml")

    assert str(error.value).startswith("bad.yaml: ")


def test_a_file_has_every_key_of_a_scenario_with_the_same_default() -> None:
    keys = {field.name: field.default for field in dataclasses.fields(ScenarioFile)}
    ours = {field.name: field.default for field in dataclasses.fields(Scenario)}

    del keys["summary"]
    assert keys == ours


@pytest.mark.parametrize("text", ["", "- a list", "words"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ScenarioError, match="a scenario is a mapping"):
        parse_scenario(text, "bad.yaml")


@pytest.mark.parametrize("name", shipped_scenarios())
def test_every_shipped_scenario_can_be_read(name: str) -> None:
    assert find_scenario(name).summary


def test_a_scenario_is_found_by_name_or_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)

    assert find_scenario(str(file)) == read_scenario(file)
    with pytest.raises(ScenarioError, match=r"no scenario 'sharde-prefix'; shipped are .*no-reuse"):
        find_scenario("sharde-prefix")
    with pytest.raises(ScenarioError, match="No such file"):
        find_scenario("./missing.yaml")


def test_another_rate_changes_the_workload_alone() -> None:
    file = parse_scenario(GOOD, "good.yaml")

    faster = file.at_rate(50.0)

    assert faster.workload != file.workload
    assert faster.engines == file.engines
