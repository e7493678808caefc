"""Prompts of less important requests, while more important ones come."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from kvoy_engine.background import PATIENCE_S, YIELD_S
from kvoy_engine.batch import Batch, RowOutput, RunnerInfo, RunnerOutput
from kvoy_engine.core import CoreConfig, EngineCore
from kvoy_engine.messages import AddRequest, ChoiceStart, SamplingParams, StepOutput
from kvoy_engine.timing_model import TimingModel

LAW = TimingModel(base_s=0.05, prefill_tokens_per_s=2000.0, context_token_s=0.0)
BUDGET = 2000


class TimedRunner:
    """Answers at once, and says how long it would have taken."""

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info

    def run(self, batch: Batch) -> RunnerOutput:
        rows = [RowOutput(token_id=0) if row.samples else RowOutput() for row in batch.rows]
        return RunnerOutput(rows, LAW.duration_s(batch))

    def free_device_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is held."""


class Engine:
    """A core on a virtual clock."""

    def __init__(self, **limits: Any) -> None:
        values: dict[str, Any] = {
            "num_blocks": 1000,
            "block_size": 100,
            "hash_stride": 100,
            "max_model_len": 40_000,
            "max_num_seqs": 64,
            "max_num_batched_tokens": BUDGET,
            "interference_ratio": 0,
            "max_step_s": 0,
            **limits,
        }
        config = CoreConfig(**values)
        info = RunnerInfo(
            config.num_blocks, config.block_size, 0, 100, config.max_model_len, "timed"
        )
        self.core = EngineCore(TimedRunner(info), config)
        self.now_s = 0.0
        self.begun_s: dict[str, float] = {}
        """When each request's first token came."""
        self.ended_s: dict[str, float] = {}
        self._names = 0

    def add(self, name: str, length: int, priority: int = 0, max_tokens: int = 1) -> None:
        """A prompt that no other begins like."""
        self._names += 1
        ids = [self._names, *range(1, length)]
        params = SamplingParams(max_tokens=max_tokens)
        starts = [ChoiceStart(0)]
        self.core.handle(
            AddRequest(name, ids, params, b"", starts, self.now_s, priority), self.now_s
        )

    def step(self) -> StepOutput:
        output = self.core.step(self.now_s)
        self.core.check_integrity()
        self.now_s = output.now_s
        for out in output.tokens:
            if out.token_ids:
                self.begun_s.setdefault(out.request_id, self.now_s)
            if out.finish_reason is not None:
                self.ended_s[out.request_id] = self.now_s
        return output

    def stream(self, priority: int = 0) -> None:
        """Someone whose answer goes on, and whose steps have been measured."""
        self.add(f"stream-{priority}", 100, priority, max_tokens=10_000)
        for _ in range(20):
            self.step()


def prefill_tokens(output: StepOutput) -> int:
    return output.num_batched_tokens - output.num_decodes


def test_a_less_important_prompt_lengthens_steps_by_little_while_more_important_ones_come() -> None:
    engine = Engine(background_ratio=1.75)
    engine.stream()
    engine.add("background", 15_000, priority=1)

    lengths_s = [engine.step().step_s for _ in range(50)]

    assert min(lengths_s) > LAW.base_s, "it goes on"
    assert max(lengths_s) <= 1.8 * LAW.base_s


def test_a_more_important_prompt_is_computed_without_a_less_important_one() -> None:
    engine = Engine()
    engine.stream()
    engine.add("background", 15_000, priority=1)
    engine.step()

    engine.add("important", 1500)

    assert prefill_tokens(engine.step()) == 1500
    assert "important" in engine.begun_s


def test_what_is_left_beside_a_short_important_prompt_is_used() -> None:
    engine = Engine(background_ratio=2.0)
    engine.stream()
    engine.add("background", 15_000, priority=1)
    alone = prefill_tokens(engine.step())

    engine.add("important", 20)

    assert 20 < prefill_tokens(engine.step()) <= 1.05 * alone


@pytest.mark.parametrize(
    ("ratio", "wait_s", "priority"), [(0.0, 0.0, 0), (1.75, YIELD_S, 0), (1.75, 0.0, 1)]
)
def test_nobody_yields_without_a_bound_or_to_nobody(
    ratio: float, wait_s: float, priority: int
) -> None:
    """No bound; nothing more important for a while; nothing more important at all."""
    engine = Engine(background_ratio=ratio)
    engine.stream(priority)
    end_s = engine.now_s + wait_s
    while engine.now_s < end_s:
        engine.step()

    engine.add("background", 15_000, priority=1)
    engine.step()

    assert prefill_tokens(engine.step()) == BUDGET - 1


def flood(engine: Engine, until_s: float, random: Random) -> Iterator[None]:
    """More important prompts than it can compute; after each step."""
    number = 0
    while engine.now_s < until_s:
        while engine.core.load().queued_prefill_tokens < 3 * BUDGET:
            number += 1
            engine.add(f"flood-{number}", random.randint(100, 3000))
        engine.step()
        yield


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_that_yields_is_served_in_the_end_and_one_after_another(seed: int) -> None:
    engine = Engine()
    engine.stream()
    names = [f"background-{number}" for number in range(4)]
    for position, name in enumerate(names):
        engine.add(name, 1000, priority=1 + position % 3)

    served = 0
    for _ in flood(engine, 6 * PATIENCE_S, Random(seed)):
        begun = sum(name in engine.begun_s for name in names)
        assert begun <= 1 + engine.now_s / PATIENCE_S, "a small share"
        served = max(served, begun)

    assert served == len(names)
    assert max(engine.begun_s[name] for name in names) <= 5.5 * PATIENCE_S


def test_one_that_makes_progress_is_not_taken_for_one_that_is_passed_over() -> None:
    engine = Engine()
    engine.stream()
    engine.add("background", 30_000, priority=1)
    number = 0
    while "background" not in engine.begun_s:
        if number < engine.now_s:
            number += 1
            engine.add(f"important-{number}", 500)
        assert engine.step().step_s <= 0.35, "never with a whole step of it"
    assert engine.begun_s["background"] > 2 * PATIENCE_S


def test_a_bound_that_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="background_ratio must be above 1, or 0: no bound; not 1"):
        CoreConfig(num_blocks=8, max_model_len=100, background_ratio=1)
