"""The pace model on imagined machines: what it learns, and how well it bounds a chunk."""

from __future__ import annotations

import random
import statistics

import pytest

from kvoy_engine.batch import Batch, RowOutput, RunnerOutput
from kvoy_engine.core import CoreConfig, EngineCore
from kvoy_engine.core_testing import PagedHashRunner
from kvoy_engine.messages import AddRequest, ChoiceStart, SamplingParams
from kvoy_engine.pace import PaceModel, StepShape


class Machine(PagedHashRunner):
    """A runner whose steps take a formula's time, with noise, on a virtual clock."""

    def __init__(
        self, base_s: float, row_s: float, token_s: float, work_s: float, noise: float, seed: int
    ) -> None:
        super().__init__(num_blocks=1)
        self._costs = (base_s, row_s, token_s, work_s)
        self._noise = noise
        self._rng = random.Random(seed)
        self._disturbed_share = 0.0

    def disturb(self, share: float) -> None:
        """From now on so many of the steps take 2 to 60 times their time."""
        self._disturbed_share = share

    def run(self, batch: Batch) -> RunnerOutput:
        base_s, row_s, token_s, work_s = self._costs
        duration_s = base_s
        for row in batch.rows:
            n = row.num_tokens
            duration_s += row_s if n == 1 else token_s * n
            duration_s += work_s * n * (row.start + n / 2)
        duration_s *= 1 + self._rng.gauss(0, self._noise)
        if self._disturbed_share and self._rng.random() < self._disturbed_share:
            duration_s *= self._rng.uniform(2, 60)
        rows = [RowOutput(1) if row.samples else RowOutput() for row in batch.rows]
        return RunnerOutput(rows, duration_s)


MACHINES = {
    "laptop": (0.008, 0.0011, 0.0006, 3e-7, 0.05),
    "slow": (0.3, 0.05, 0.02, 3e-6, 0.03),
    "gpu": (0.006, 1e-5, 3e-5, 1e-9, 0.03),
}


class Engine:
    def __init__(self, machine: str, seed: int) -> None:
        config = CoreConfig(num_blocks=4000, max_model_len=9000, max_num_batched_tokens=2048)
        self.machine = Machine(*MACHINES[machine], seed=seed)
        self.core = EngineCore(self.machine, config)
        self.now_s = 0.0

    def add(self, name: str, num_prompt: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        ids = [len(name)] + [ord(name[0])] * (num_prompt - 1)
        starts = [ChoiceStart(0)]
        self.core.handle(AddRequest(name, ids, params, b"s" * 16, starts, self.now_s), self.now_s)

    def step(self, num_steps: int) -> list[float]:
        """Seconds of each step."""
        gaps = []
        for _ in range(num_steps):
            output = self.core.step(self.now_s)
            gaps.append(output.now_s - self.now_s)
            self.now_s = output.now_s
        return gaps

    def first_token_s(self, name: str) -> tuple[float, list[float]]:
        """Seconds until the first token of a request, and those of each step on the way."""
        began_s, gaps = self.now_s, []
        while True:
            output = self.core.step(self.now_s)
            gaps.append(output.now_s - self.now_s)
            self.now_s = output.now_s
            if any(out.request_id == name for out in output.tokens):
                return self.now_s - began_s, gaps


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_prompt_neither_stalls_streams_nor_starves(machine: str, seed: int) -> None:
    idle = Engine(machine, seed)
    idle.add("long", 4000, 1)
    alone_s, _ = idle.first_token_s("long")
    engine = Engine(machine, seed + 100)
    for i in range(8):
        engine.add("abcdefgh"[i], 60, 4000)
    quiet = [engine.first_token_s("a")[0] for _ in range(50)][1:]

    engine.add("long", 4000, 1)
    loaded_s, gaps = engine.first_token_s("long")

    p99 = sorted(gaps)[int(0.99 * len(gaps))]
    assert p99 <= 3 * statistics.median(quiet)
    assert loaded_s <= 2.5 * alone_s


def test_a_long_prompt_alone_is_computed_in_steps_that_leave_time_for_others() -> None:
    engine = Engine("laptop", 0)
    engine.add("long", 8000, 1)

    _, steps = engine.first_token_s("long")

    # Unbounded, a step of 2,048 tokens of this machine takes 1.3 s at first and 5.8 s at last.
    assert max(steps) < 1.3
    assert sum(steps) / len(steps) > 0.4


@pytest.mark.parametrize("seed", range(4))
def test_a_time_of_disturbed_steps_does_not_spoil_the_bound_afterwards(seed: int) -> None:
    engine = Engine("laptop", seed)
    engine.machine.disturb(share=0.7)
    engine.add("before", 4000, 1)
    engine.first_token_s("before")
    for name in "abcdefgh":
        engine.add(name, 30, 3000)
    engine.step(60)
    engine.add("meanwhile", 4000, 1)
    engine.first_token_s("meanwhile")

    engine.machine.disturb(share=0.0)
    usual_s = statistics.median(engine.step(60)[20:])
    engine.add("x", 4000, 1)
    _, gaps = engine.first_token_s("x")

    assert statistics.quantiles(gaps, n=100)[98] < 3.5 * usual_s


def test_it_learns_the_costs_of_a_machine_from_mixed_steps() -> None:
    rng = random.Random(1)
    pace = PaceModel()
    for _ in range(400):
        num_decodes = rng.randrange(32)
        tokens = rng.choice([0, 0, rng.randrange(1, 2000)])
        start = rng.randrange(4000)
        shape = StepShape(
            num_decodes, num_decodes * 500, tokens, tokens and start + tokens, tokens * start
        )
        pace.observe(shape, seconds(shape) * rng.uniform(0.95, 1.05))

    shape = StepShape(16, 8000, 300, 2300, 300 * 2000)
    assert pace.estimate_s(shape) == pytest.approx(seconds(shape), rel=0.1)
    limit = pace.chunk_limit(0.2, 1000)
    added = StepShape(0, 0, limit, 1000 + limit, limit * (1000 + limit / 2))
    assert seconds(added) - seconds(StepShape()) == pytest.approx(0.2, rel=0.15)


def seconds(shape: StepShape) -> float:
    return (
        0.01
        + 0.001 * shape.num_decodes
        + 1e-6 * (shape.decode_context + shape.prefill_context)
        + 4e-4 * shape.prefill_tokens
        + 1e-7 * shape.prefill_work
    )


def test_chunks_are_large_where_prefill_costs_nothing() -> None:
    """Steps of any size take the same time, so the first one misleads by orders of magnitude."""
    pace = PaceModel()
    pace.observe(StepShape(0, 0, 8192, 8192, 8192 * 4096), 0.02)
    for i in range(5):
        pace.observe(StepShape(16, 8000 + 16 * i), 0.02)

    allowance_s = pace.allowance_s(StepShape(16, 8000), 2.5)

    assert pace.chunk_limit(allowance_s, 0) > 1000


def test_a_hiccup_of_the_machine_moves_the_estimate_little() -> None:
    pace = PaceModel()
    shape = StepShape(8, 4000)
    for _ in range(50):
        pace.observe(shape, 0.02)

    pace.observe(shape, 2.0)

    assert pace.estimate_s(shape) < 0.03


def test_it_follows_a_machine_that_becomes_slower() -> None:
    pace = PaceModel()
    shape = StepShape(8, 4000)
    for duration_s in [0.02] * 200 + [0.05] * 150:
        pace.observe(shape, duration_s)

    assert pace.estimate_s(shape) == pytest.approx(0.05, rel=0.1)
    assert pace.step_time_s == pytest.approx(0.05, rel=0.1)


def test_it_does_not_extrapolate_far_beyond_the_largest_chunk_seen() -> None:
    pace = PaceModel()
    assert pace.chunk_limit(1000.0, 0) == 64

    pace.observe(StepShape(0, 0, 100, 100, 5000), 0.001)

    assert pace.chunk_limit(1000.0, 0) == 200


def test_before_anything_was_measured_its_rates_are_zero() -> None:
    pace = PaceModel()

    assert (pace.step_time_s, pace.prefill_tokens_per_s) == (0.0, 0.0)
    pace.observe(StepShape(1, 10), 0.0)
    assert pace.step_time_s == 0.0


def test_ten_thousand_steps_leave_it_finite_and_right() -> None:
    rng = random.Random(2)
    pace = PaceModel()
    for i in range(10_000):
        shape = StepShape(8, 8 * (i % 500), *((64, 64 + i % 900, 64 * (i % 900)) if i % 3 else ()))
        pace.observe(shape, seconds(shape) * rng.uniform(0.9, 1.1))

    assert pace.estimate_s(StepShape(8, 2000)) == pytest.approx(0.02, rel=0.1)
