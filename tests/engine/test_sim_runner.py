"""The timing model and the runner that waits instead of computing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from kvoy_engine.batch import Batch, Row
from kvoy_engine.core import CoreConfig, EngineCore
from kvoy_engine.messages import AddRequest, ChoiceStart, FinishReason, SamplingParams
from kvoy_engine.sim_runner import PRINTABLE_ASCII, SimRunner
from kvoy_engine.timing_model import TimingModel


class FakeClock:
    """`sleep` oversleeps by what `lateness` says."""

    def __init__(self, lateness_s: Sequence[float] = (0.0,)) -> None:
        self.now_s = 100.0
        self._lateness_s = lateness_s
        self._num_sleeps = 0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds + self._lateness_s[self._num_sleeps % len(self._lateness_s)]
        self._num_sleeps += 1


def row(
    params: SamplingParams | None = None,
    *,
    num_tokens: int = 1,
    start: int = 10,
    samples: bool = True,
    choice: int = 0,
    output_ids: Sequence[int] = (),
    wants_prompt_logprobs: bool = False,
) -> Row:
    return Row(
        seq_id=1,
        token_ids=[65] * num_tokens,
        start=start,
        block_table=[0],
        samples=samples,
        params=params or SamplingParams(max_tokens=10),
        choice=choice,
        prompt_ids=[65] * 20,
        output_ids=output_ids,
        wants_prompt_logprobs=wants_prompt_logprobs,
    )


def sim(clock: FakeClock | None = None, token_ids: Sequence[int] = PRINTABLE_ASCII) -> SimRunner:
    clock = clock or FakeClock()
    return SimRunner(
        TimingModel(),
        num_blocks=64,
        token_ids=token_ids,
        clock=clock.clock,
        sleep=clock.sleep,
    )


def tokens(
    params: SamplingParams,
    count: int = 200,
    choice: int = 0,
    token_ids: Sequence[int] = PRINTABLE_ASCII,
) -> list[int]:
    runner = sim(token_ids=token_ids)
    output: list[int] = []
    for _ in range(count):
        [result] = runner.run(Batch([row(params, choice=choice, output_ids=output)])).rows
        assert result.token_id is not None
        output.append(result.token_id)
    return output


@pytest.mark.parametrize(
    ("rows", "expected_s"),
    [
        ([row(start=999)], 0.014 + 1000 * 55e-9),
        ([row(num_tokens=1600, start=0)], 0.014 + 0.1 + 1600 * 55e-9),
        ([row(num_tokens=160, start=40, samples=False)], 0.014 + 0.01 + 200 * 55e-9),
        ([row(start=99), row(start=99), row(num_tokens=16, start=0)], 0.015 + 216 * 55e-9),
    ],
)
def test_a_step_takes_the_time_of_its_prefill_and_context(
    rows: list[Row], expected_s: float
) -> None:
    assert TimingModel().duration_s(Batch(rows)) == pytest.approx(expected_s)


@pytest.mark.parametrize("field", ["base_s", "context_token_s", "row_s"])
def test_a_negative_cost_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        TimingModel(**{field: -1.0})


def test_a_busy_runner_keeps_the_models_pace_despite_late_sleeps_and_work_between() -> None:
    clock = FakeClock(lateness_s=(0.001, 0.0, 0.004))
    runner = sim(clock)
    began_s = clock.now_s

    total_s = 0.0
    for i in range(300):
        total_s += runner.run(Batch([row(start=i)])).duration_s
        clock.now_s += 0.002

    assert clock.now_s - began_s == pytest.approx(total_s, abs=0.01)


def test_a_step_after_a_pause_takes_its_full_time() -> None:
    clock = FakeClock()
    runner = sim(clock)
    runner.run(Batch([row()]))
    clock.now_s += 5.0
    began_s = clock.now_s

    duration_s = runner.run(Batch([row()])).duration_s

    assert clock.now_s - began_s == pytest.approx(duration_s)


def test_tokens_are_printable_and_depend_on_seed_choice_and_position_alone() -> None:
    first = tokens(SamplingParams(max_tokens=10, seed=1))

    assert all(0x20 <= token_id < 0x7F for token_id in first)
    assert len(set(first)) > 50
    assert tokens(SamplingParams(max_tokens=10, seed=1)) == first
    assert tokens(SamplingParams(max_tokens=10, seed=2)) != first
    assert tokens(SamplingParams(max_tokens=10, seed=1), choice=1) != first


def test_the_ids_of_another_tokenizer_can_be_given() -> None:
    assert set(tokens(SamplingParams(max_tokens=10), token_ids=[7, 9, 200])) == {7, 9, 200}


@pytest.mark.parametrize("token_ids", [[], [256], [-1]])
def test_ids_outside_the_vocabulary_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        sim(token_ids=token_ids)


def test_banned_ids_never_come_and_stop_ids_not_before_min_tokens() -> None:
    banned = tokens(SamplingParams(max_tokens=10, banned_token_ids=(7,)), token_ids=[7, 8, 9])
    assert set(banned) == {8, 9}

    params = SamplingParams(max_tokens=10, min_tokens=100, stop_token_ids=(7, 8))
    early = tokens(params, token_ids=[7, 8, 9])
    assert set(early[:100]) == {9}
    assert set(early[100:]) == {7, 8, 9}


def test_a_large_logit_bias_forces_or_forbids_a_token() -> None:
    forced = SamplingParams(max_tokens=10, logit_bias={8: 100.0, 9: 60.0})
    assert set(tokens(forced, token_ids=[7, 8, 9])) == {8}

    forbidden = SamplingParams(max_tokens=10, logit_bias={8: -100.0, 9: 1.0})
    assert set(tokens(forbidden, token_ids=[7, 8, 9])) == {7, 9}


def test_logprobs_are_finite_and_consistent() -> None:
    params = SamplingParams(max_tokens=10, logprobs=3, prompt_logprobs=1)

    [first, last] = (
        sim(token_ids=[65, 66, 67, 68])
        .run(
            Batch(
                [
                    row(params, num_tokens=8, start=0, samples=False, wants_prompt_logprobs=True),
                    row(params, num_tokens=12, start=8, wants_prompt_logprobs=True),
                ]
            )
        )
        .rows
    )

    assert len(first.prompt_logprobs) + len(last.prompt_logprobs) == 19
    assert first.logprob is None
    assert last.logprob is not None
    assert last.logprob.token_id == last.token_id
    assert last.logprob.logprob == -math.log(4)
    assert last.logprob.top[0] == (last.token_id, -math.log(4))
    assert len(last.logprob.top) == 3


def test_an_engine_on_a_virtual_clock_serves_a_burst() -> None:
    """The core and the timing model need no real time at all."""
    clock = FakeClock()
    runner = SimRunner(TimingModel(), num_blocks=512, clock=clock.clock, sleep=clock.sleep)
    core = EngineCore(runner, CoreConfig(num_blocks=512, max_model_len=2048))
    rng = random.Random(3)
    for i in range(64):
        ids = [rng.randrange(256) for _ in range(200)]
        params = SamplingParams(max_tokens=50, seed=i)
        core.handle(AddRequest(f"r{i}", ids, params, b"s" * 16, [ChoiceStart(0)]), 0.0)

    now_s, finished = 0.0, []
    while core.has_work:
        output = core.step(now_s)
        now_s = output.now_s
        finished += [out for out in output.tokens if out.finish_reason]

    assert [out.finish_reason for out in finished] == [FinishReason.LENGTH] * 64
    assert core.load().generated_tokens == 64 * 50
    assert core.load().step_time_s == pytest.approx(0.0147, rel=0.03)
