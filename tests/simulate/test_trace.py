"""Traces in the Mooncake format: read, written, replayed, made up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from kvoy_simulate.trace import (
    BLOCK_TOKENS,
    Generated,
    Record,
    Trace,
    TraceError,
    generate,
    read_trace,
    unbounded_hit_share,
    write_trace,
)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    records = list(generate(Generated(duration_s=20), seed=1))

    num_written = write_trace(tmp_path / name, records)

    assert num_written == len(records) > 20
    assert read_trace(tmp_path / name) == records


def test_equal_ids_are_equal_beginnings(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(
        file,
        [
            Record(timestamp=5000, input_length=1500, output_length=10, hash_ids=[0, 1, 2]),
            Record(timestamp=6000, input_length=1300, output_length=0, hash_ids=[0, 1, 3]),
        ],
    )

    one, other = Trace(file=str(file), speed=2.0).build("w", 0).start()

    shared = 2 * BLOCK_TOKENS // 64
    assert one.prompt.hashes(64)[:shared] == other.prompt.hashes(64)[:shared]
    assert not set(one.prompt.hashes(64)[shared:]) & set(other.prompt.hashes(64)[shared:])
    assert [r.num_prompt_tokens for r in (one, other)] == [1500, 1300]
    assert [r.arrival_s for r in (one, other)] == [0.0, 0.5]
    assert other.max_tokens == 1
    assert one.session == other.session


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}', "hash_ids"),
        ('{"timestamp": "x", "input_length": 2, "output_length": 3, "hash_ids": []}', "timestamp"),
        ("not json", "malformed"),
        ('{"timestamp": 8, "input_length": 2, "output_length": 3, "hash_ids": []}', "backwards"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "trace.jsonl"
    good = '{"timestamp": 9, "input_length": 2, "output_length": 3, "hash_ids": [1]}\n'
    file.write_text(good + "\n" + line + "\n")

    with pytest.raises(TraceError, match=f"line 3.*{reason}"):
        read_trace(file)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(TraceError, match=r"/nowhere/t\.jsonl"):
        read_trace(Path("/nowhere/t.jsonl"))


def test_a_packed_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl.gz"
    write_trace(file, generate(Generated(duration_s=5), seed=1))
    file.write_bytes(file.read_bytes()[:-20])

    with pytest.raises(TraceError, match="cut short"):
        read_trace(file)


def test_a_generated_trace_has_the_rate_and_the_reuse_that_it_promises() -> None:
    records = list(generate(Generated(rate=4, duration_s=600, mean_turns=3), seed=0))

    later = [record for record in records if record.timestamp >= 200_000]
    assert len(later) / 400 == pytest.approx(4.0, rel=0.2)
    assert 0.4 < unbounded_hit_share(records) < 0.7
    for record in records:
        assert len(record.hash_ids) == -(-record.input_length // BLOCK_TOKENS)
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(records))


def test_reuse_is_counted_by_blocks() -> None:
    records = [Record(0, 1024, 1, [1, 2]), Record(1, 1536, 1, [1, 2, 3])]

    assert unbounded_hit_share(records) == 2 / 5
    assert unbounded_hit_share([]) == 0.0
