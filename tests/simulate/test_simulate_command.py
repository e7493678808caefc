"""`kvoy simulate` on a fleet so small that a run takes no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvoy_cli.__main__ import main
from kvoy_simulate.goals import Case
from kvoy_simulate.runs import Job, execute, execute_all, find_knee
from kvoy_simulate.scenario_file import parse_scenario
from kvoy_simulate.trace import read_trace

TINY = """
summary: two small engines
engines:
  - name: engine
    count: 2
    core: {num_blocks: 2000, max_model_len: 4096}
workload:
  kind: shared-prefix
  arrivals: {rate: 4}
  groups: 4
  prefix_tokens: 1024
  question_tokens: 128
  output_tokens: 20
warmup_s: 2
duration_s: 8
drain_s: 5
events:
  - {kind: telemetry-lost, at_s: 4, for_s: 1}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return str(file)


def json_of(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["simulate", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_prints_what_it_measured(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["simulate", "run", tiny, "--seeds", "2", "--processes", "1"])

    out = capsys.readouterr().out
    assert status == 0
    assert "two small engines" in out
    assert "kv-aware, seeds 0 to 1" in out
    assert "TTFT p90, s" in out


def test_a_seed_fixes_every_figure(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    one, again = (json_of(capsys, "run", tiny, "--seed", "3") for _ in range(2))
    other = json_of(capsys, "run", tiny, "--seed", "4")

    assert one == again
    assert one["figures"] != other["figures"]
    assert one["figures"][0]["lost"] == 0
    assert 0.5 < one["figures"][0]["hit_rate"] < 1.0


def test_a_rate_and_a_trace_replace_the_workload(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    assert main(["simulate", "trace", str(trace), "--rate", "2", "--duration", "10"]) == 0
    assert f"{len(read_trace(trace))} requests" in capsys.readouterr().out

    slow = json_of(capsys, "run", tiny, "--rate", "1")["figures"][0]["requests"]
    replayed = json_of(capsys, "run", tiny, "--trace", str(trace))["figures"][0]["requests"]

    usual = json_of(capsys, "run", tiny)["figures"][0]["requests"]
    assert slow < usual
    assert replayed == sum(2000 <= record.timestamp < 8000 for record in read_trace(trace))


def test_tenants_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = TINY.index("workload:")
    end = TINY.index("warmup_s")
    mix = """workload:
  kind: mix
  parts:
    a: &part {kind: independent, arrivals: {rate: 5}, output_tokens: 10}
    b: *part
"""
    file = tmp_path / "mix.yaml"
    file.write_text(TINY[:begin] + mix + TINY[end:])

    figures = json_of(capsys, "run", str(file))["figures"][0]
    assert main(["simulate", "run", str(file)]) == 0

    assert figures["TTFT p90 of a, s"] > 0
    assert "TTFT p90 of b, s" in capsys.readouterr().out


def test_policies_are_compared_over_the_same_requests(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["compare", tiny, "--policies", "kv-aware,random", "--seeds", "2", "--processes", "1"]

    value = json_of(capsys, *argv)
    assert main(["simulate", *argv]) == 0

    ours, other = value["figures"]["kv-aware"], value["figures"]["random"]
    assert [run["requests"] for run in ours] == [run["requests"] for run in other]
    assert all(a["hit_rate"] > b["hit_rate"] for a, b in zip(ours, other, strict=True))
    assert "random ÷ kv-aware" in capsys.readouterr().out


def test_several_processes_find_what_one_does(tiny: str) -> None:
    jobs = [Job(Case(tiny, policy), 0) for policy in ("kv-aware", "least-load")]

    assert execute_all(jobs, num_processes=2) == execute_all(jobs, num_processes=1)


def test_a_failure_names_its_run_and_ends_those_beside_it(tiny: str) -> None:
    endless = Case(tiny, "kv-aware", time_share=1e6)

    with pytest.raises(ValueError, match="policy must be one of") as failure:
        execute_all([Job(endless, 7), Job(Case(tiny, "best"), 7)], num_processes=2)

    assert failure.value.__notes__ == [f"in {Case(tiny, 'best').label}, seed 7"]


def test_a_ladder_ends_between_a_rate_within_and_one_beyond() -> None:
    core = "max_model_len: 4096}"
    slow = TINY.replace(core, core + "\n    step: {prefill_tokens_per_s: 1500}")

    scenario = parse_scenario(slow, "slow.yaml")
    ladder = find_knee(scenario, "kv-aware", 0, first_rate=1.0, tolerance=0.5)

    beyond = min(rung.rate for rung in ladder.rungs if not rung.is_within(1.0))
    assert 0.0 < ladder.knee < beyond <= ladder.knee + 0.5


def test_recovery_is_measured_against_the_run_without_events(tiny: str) -> None:
    figures = execute(Job(Case(tiny, finds_recovery=True), 0))

    assert figures["recovery_s"] >= 0.0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "sharde-prefix"], "no scenario 'sharde-prefix'"),
        (["run", "no-reuse", "--policy", "best"], "policy must be one of"),
        (["run", "no-reuse", "--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["run", "greedy-tenant", "--rate", "3"], "mix has no single rate"),
        (["goals", "--only", "nothing"], "no row contains 'nothing'"),
        (["fly"], "no command 'fly'"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *argv]) == 1

    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("kvoy simulate: ")


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "no-reuse", "--seeds", "0"],
        ["compare", "no-reuse", "--policies", "random"],
        ["ladder", "no-reuse", "--tolerance", "0"],
    ],
)
def test_a_bad_option_is_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *argv])

    assert argv[2] in capsys.readouterr().err


def test_list_has_every_shipped_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "list"]) == 0

    assert "shared-prefix   " in capsys.readouterr().out


@pytest.mark.slow
def test_plots_are_written_as_png_and_svg(tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "plots"

    assert main(["simulate", "run", tiny, "--plots", str(folder)]) == 0

    names = {file.stem for file in folder.iterdir()}
    assert names == {"ttft", "tpot", "throughput", "hit-rate", "load", "memory"}
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (folder / f"{name}.svg").read_bytes()


@pytest.mark.slow
def test_the_goals_table_runs_at_a_tenth_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["simulate", "goals", "--smoke", "--seeds", "1", "--only", "code", "--json"])

    (verdict,) = json.loads(capsys.readouterr().out)
    assert status == 0
    assert verdict["row"] == "code generation"
    assert verdict["measured"]["value"] > 0


def test_scale_tells_what_a_virtual_second_brings(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engines", "3", "--rate", "20", "--warmup", "8", "--duration", "2", "--json"]
    assert main(["simulate", "scale", *options, "--kv-tokens", "32768"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["requests_per_s"] == pytest.approx(20, rel=0.5)
    assert measured["tokens_per_s"] == pytest.approx(100 * measured["requests_per_s"], rel=0.5)
    assert measured["full_share"] == pytest.approx(1, abs=0.1)  # a cache takes five seconds to fill


def test_scale_refuses_a_cache_smaller_than_a_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "scale", "--kv-tokens", "32767"])
    assert "--kv-tokens must be at least 32768, not 32767" in capsys.readouterr().err
