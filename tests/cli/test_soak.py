"""The soak: what it counts as wrong, when memory counts as flat, and short runs of both kinds."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvoy_cli.bench import main
from kvoy_cli.bench.processes import BenchError
from kvoy_cli.bench.soak.config import SoakConfig
from kvoy_cli.bench.soak.file_limit import raise_file_limit
from kvoy_cli.bench.soak.memory import Growth, Sample
from kvoy_cli.bench.soak.numbered import StreamCheck, Tally, event, number_in
from kvoy_cli.bench.soak.prompt_client import Progress
from kvoy_cli.bench.soak.prompts import CACHES, full_at_s
from kvoy_cli.bench.soak.watch import Course, Watched, read_gauges


def _checked(*numbers: int, num_events: int = 4, end: bool = True) -> Tally:
    tally = Tally()
    check = StreamCheck("s1", num_events, tally)
    for number in numbers:
        check.on_event(event("s1", number))
    if end:
        check.on_end()
    return tally


def test_a_stream_in_order_is_right() -> None:
    tally = _checked(0, 1, 2, 3)

    assert tally.num_wrong == 0
    assert (tally.events, tally.streams) == (4, 1)


def test_a_chunk_in_the_middle_and_one_at_the_end_are_missed() -> None:
    assert _checked(0, 2, 3).lost == 1
    assert _checked(0, 1, 2).lost == 1
    assert _checked(0, 1, 2, end=False).lost == 0


def test_a_chunk_that_comes_twice_or_late_is_seen() -> None:
    assert _checked(0, 1, 1, 2, 3).repeated == 1
    late = _checked(0, 2, 1, 3)
    assert (late.lost, late.repeated) == (1, 1)


def test_a_chunk_of_another_stream_or_a_changed_one_is_seen() -> None:
    tally = Tally()
    check = StreamCheck("s1", 2, tally)

    check.on_event(event("s2", 0))
    check.on_event(event("s1", 0).replace(b"delta", b"Delta"))
    check.on_event(event("s1", 0)[:-1])

    assert tally.strange == 3


def test_an_event_tells_its_number() -> None:
    assert number_in(b"s7", event("s7", 123)) == 123
    assert number_in(b"s7", b"data: [DONE]\n\n") is None


def _samples(*sizes: float) -> list[Sample]:
    return [Sample(float(at), round(size), 0.0) for at, size in enumerate(sizes)]


def test_growth_has_a_slope_and_a_spread() -> None:
    flat = Growth.of(_samples(100, 102, 99, 101))
    growing = Growth.of(_samples(*(100 + at for at in range(11))))

    assert flat.spread == pytest.approx(3 / 99)
    assert growing.bytes_per_hour == pytest.approx(3600)
    assert growing.spread == pytest.approx(0.1)
    assert (growing.first_bytes, growing.last_bytes) == (100, 110)


def test_growth_needs_two_samples() -> None:
    with pytest.raises(ValueError, match="two samples"):
        Growth.of(_samples(1))


def test_gauges_are_series_without_labels() -> None:
    text = '# HELP a b\na 1.5\nb{c="d"} 2\ne 3e2\n'

    assert read_gauges(text) == {"a": 1.5, "e": 300.0}


def test_a_cache_is_full_near_its_bound() -> None:
    cache = CACHES[1]
    course: Course[Progress] = Course()
    for at, share in enumerate((0.1, 0.89, 0.96, 0.94)):
        sample = Sample(float(at), 1, 0.0)
        course.looks.append(Watched(sample, {cache.gauge: share * cache.bound}))

    assert full_at_s(course, cache) == 2.0
    assert full_at_s(Course(), cache) == float("inf")


def test_too_few_open_files_are_an_error_that_names_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)

    with pytest.raises(BenchError, match=r"11,024 open files .* 4,096: raise the hard limit"):
        raise_file_limit(5000)


def test_the_soak_is_as_large_as_it_says_without_options() -> None:
    streams, prompts = SoakConfig("streams"), SoakConfig("prompts")

    assert (streams.streams, streams.per_s, streams.duration_s) == (5000, 20_000.0, 600.0)
    assert streams.warmup_s == 2 * 1.5 * 240 * 0.25
    assert prompts.duration_s == 3600.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "none_of", "some_of"),
    [
        (["streams", "--streams", "40", "--rate", "400", "--chunks", "20"], "wrong", "chunks"),
        (["prompts", "--rate", "10", "--prompt-tokens", "300"], "failed", "answered"),
    ],
)
def test_a_soak_in_small_comes_through_a_router_whole(
    argv: list[str], none_of: str, some_of: str, tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    common = ["--duration", "4", "--warmup", "1", "--model", "bytes", "--output", str(output)]

    assert main(["soak", *argv, *common]) == 0

    text = output.read_text()
    assert f'"{none_of}": 0.0' in text
    assert f'"{some_of}": ' in text
    assert f'"{some_of}": 0.0' not in text
