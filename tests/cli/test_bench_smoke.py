"""Benchmarks run from end to end with tiny sizes; their figures mean nothing here."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest

from kvoy_cli.bench import main
from kvoy_cli.bench.client import Client, send_until
from kvoy_cli.bench.config import NAMES
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.fake_answers import MODEL
from kvoy_cli.bench.fake_engine import Admissions
from kvoy_cli.bench.outcome import Outcome
from kvoy_cli.bench.processes import BenchError, child, cpu_seconds, free_ports, wait_until
from kvoy_cli.bench.request import completion
from kvoy_cli.bench.router_cost import fake_engines


def _context(folder: Path) -> BenchContext:
    return BenchContext("no-model", 1, folder, lambda text: None, secret="s", is_smoke=True)


@pytest.mark.parametrize("name", [*NAMES, "run"])
def test_every_benchmark_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])

    assert exit_info.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["nonsense"], "nonsense"),
        (["memory", "--repeats", "0"], "--repeats"),
        (["run"], "--rate and --concurrency"),
        (["run", "--rate", "1", "--concurrency", "1"], "--rate and --concurrency"),
        (["run", "--rate", "-1"], "--rate"),
        (["run", "--workload", "conversation", "--rate", "1"], "--concurrency"),
        (["soak", "nonsense"], "nonsense"),
        (["soak", "streams", "--streams", "0"], "--streams"),
        (["soak", "streams", "--duration", "10", "--warmup", "10"], "--warmup"),
    ],
)
def test_a_wrong_setting_is_named(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(argv)

    assert exit_info.value.code == 2
    assert complaint in capsys.readouterr().err


def test_numbers_settle_in_whatever_order_they_arrive() -> None:
    admissions = Admissions()

    for number in (1, 3, 2, 6):
        admissions.add(number, 0)
    assert (admissions.through, admissions.beyond) == (3, {6})

    admissions.add(7, 5)
    assert (admissions.through, admissions.beyond) == (7, set())


async def test_a_child_that_ends_early_is_reported_with_its_log(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    async with child("brief", ["sh", "-c", "echo no luck >&2; exit 3"], tmp_path) as process:
        with pytest.raises(BenchError, match=r"(?s)brief ended .*status 3.*no luck"):
            await wait_until(never, [process], "anything", 20.0)


async def test_a_child_is_gone_after_its_block_even_if_it_ignores_sigterm(tmp_path: Path) -> None:
    script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    async with child("stubborn", ["sh", "-c", script], tmp_path, stop_s=0.2) as process:

        async def is_ready() -> bool:
            return "ready" in process.log_tail()

        await wait_until(is_ready, [process], "its trap", 20.0)
        assert cpu_seconds(process.pid) >= 0.0

    assert process.has_ended


@pytest.mark.slow
async def test_the_client_sees_each_event_of_a_stream(tmp_path: Path) -> None:
    async with (
        fake_engines(_context(tmp_path), "--gap-s", "0.001") as (entry,),
        Client(entry.partition("@")[0]) as client,
    ):
        whole = await client.send(completion(MODEL, "hello", 5, stream=False))
        streamed = await client.send(completion(MODEL, "hello", 5))
        cut = Outcome(due_s=0.0)
        with contextlib.suppress(TimeoutError):
            await send_until(client, completion(MODEL, "hello", 5000), cut, 3)

    assert whole.is_ok
    assert whole.completion_tokens == 5
    assert streamed.is_ok
    assert len(streamed.arrivals) == 5
    assert streamed.text == " word more word more word"
    assert cut.is_cut
    assert 3 <= len(cut.arrivals) < 5000


async def test_a_server_that_is_not_there_is_an_outcome_not_an_exception() -> None:
    (port,) = free_ports(1)
    async with Client(f"http://127.0.0.1:{port}/v1") as client:
        outcome = await client.send(completion("m", "hello", 1))

    assert not outcome.is_ok
    assert outcome.error is not None
    assert "refused" in outcome.error.lower()


@pytest.mark.slow
def test_the_shared_prefix_benchmark_runs_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["shared-prefix", "--smoke", "--repeats", "1", "--json", "--logs", str(tmp_path)]

    assert main(argv) == 0

    (report,) = msgspec.json.decode(capsys.readouterr().out)["benches"]
    assert report["name"] == "shared-prefix"
    assert [goal["name"][:20] for goal in report["goals"]] == [
        "output tokens/s at 3",
        "TTFT p90 at round-ro",
    ]
    assert all(goal["figure"] is not None for goal in report["goals"])


@pytest.mark.slow
def test_the_router_cost_benchmark_runs_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["router-cost", "--smoke", "--repeats", "1", "--json", "--logs", str(tmp_path)]

    assert main(argv) == 0

    (report,) = msgspec.json.decode(capsys.readouterr().out)["benches"]
    assert report["figures"]["cpu_us_per_chunk_router"] > 0
    assert report["figures"]["resident_mb"] > 10


@pytest.mark.slow
def test_the_index_benchmark_runs_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["index", "--smoke", "--repeats", "1", "--json", "--logs", str(tmp_path)]

    assert main(argv) == 0

    (report,) = msgspec.json.decode(capsys.readouterr().out)["benches"]
    assert len(report["goals"]) == 5
    assert all(goal["figure"] is not None for goal in report["goals"])
    assert report["figures"]["hash_events_per_s"] > 0


@pytest.mark.slow
def test_the_tokenise_benchmark_runs_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["tokenise", "--smoke", "--repeats", "1", "--json", "--logs", str(tmp_path)]

    assert main(argv) == 0

    (report,) = msgspec.json.decode(capsys.readouterr().out)["benches"]
    pieces, cold, delay = report["goals"]
    assert pieces["figure"] == 2
    assert cold["figure"] > 0
    assert delay["figure"] > 0


@pytest.mark.slow
def test_load_reports_are_counted_and_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["reports", "--smoke", "--repeats", "1", "--json", "--logs", str(tmp_path)]

    assert main(argv) == 0

    (report,) = msgspec.json.decode(capsys.readouterr().out)["benches"]
    assert report["figures"]["bounded_reports_per_s"] > 0
    assert report["figures"]["us_per_report"] > 0
