"""Steps as they are written down."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from kvoy_engine.build import ModelLoadFailed, build_core
from kvoy_engine.config import EngineConfig
from kvoy_engine.core import EngineCore
from kvoy_engine.core_config import CoreConfig
from kvoy_engine.messages import AddRequest, ChoiceStart, SamplingParams
from kvoy_engine.sim_runner import SimRunner
from kvoy_engine.step_log import LoggedRunner, read_steps
from kvoy_engine.timing_model import TimingModel


def core_that_logs(path: Path) -> EngineCore:
    sim = SimRunner(
        TimingModel(base_s=0.0, prefill_tokens_per_s=1e9, context_token_s=0.0),
        num_blocks=64,
        block_size=16,
        block_bytes=1,
        max_model_len=256,
        vocab_size=128,
        token_ids=(65, 66),
    )
    ticks = count(start=1)
    runner = LoggedRunner(sim, path, clock=lambda: float(next(ticks)))
    return EngineCore(runner, CoreConfig(num_blocks=64, max_model_len=256))


def test_a_prompt_and_its_decodes_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    core = core_that_logs(path)
    core.handle(
        AddRequest(
            request_id="r",
            prompt_ids=[65] * 40,
            params=SamplingParams(max_tokens=3),
            seed_hash=b"",
            choices=[ChoiceStart(0)],
            arrival_s=0.0,
        ),
        0.0,
    )

    while core.has_work:
        core.step(0.0)
    core.runner.close()

    steps = read_steps(path)
    assert [(s.rows, s.prefill_tokens, s.context_tokens) for s in steps] == [
        (1, 40, 40),
        (1, 0, 41),
        (1, 0, 42),
    ]
    assert [(s.begin_s, s.end_s) for s in steps] == [(1, 2), (3, 4), (5, 6)]


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    line = b'{"begin_s":1,"end_s":2,"rows":1,"prefill_tokens":0,"context_tokens":5}\n'
    path.write_bytes(line + line[:20])

    assert len(read_steps(path)) == 1


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    config = EngineConfig(model="sim", runner="sim", step_log=str(tmp_path / "none" / "steps"))

    with pytest.raises(ModelLoadFailed, match=r"--step-log .*No such file"):
        build_core(config, lambda text: None)
