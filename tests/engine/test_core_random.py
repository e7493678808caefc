"""Random workloads on pools of all sizes: every request ends, with the tokens of an uncached
run."""

from __future__ import annotations

import random

import pytest

from kvoy_engine.core import CoreConfig
from kvoy_engine.core_testing import CoreDriver, naive_output, naive_prompt_logprobs
from kvoy_engine.messages import ChoiceStart, FinishReason, SamplingParams


class Workload:
    """Requests with shared prefixes, sent, aborted and run in random order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        block_size = rng.choice([1, 2, 4, 16])
        capacity = rng.randrange(24, 400)
        max_num_seqs = rng.choice([1, 3, 8, 32])
        self.config = CoreConfig(
            num_blocks=max(capacity // block_size, 2),
            max_model_len=rng.choice([64, 1000]),
            block_size=block_size,
            hash_stride=block_size * rng.choice([1, 2, 4]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 5, 40, 500]),
            enable_prefix_caching=rng.random() < 0.9,
            interference_ratio=rng.choice([0, 1.5, 2.5]),
            background_ratio=rng.choice([0, 1.1, 2.0]),
        )
        self.prefixes = [[rng.randrange(50) for _ in range(rng.randrange(1, 60))] for _ in range(3)]
        self.failing = {(f"r{i}", rng.randrange(6)) for i in range(40) if rng.random() < 0.05}
        self.driver = CoreDriver(self.config, self.failing)
        self.sent: dict[str, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[tuple[str, int]] = set()

    def send(self) -> None:
        rng = self.rng
        name = f"r{len(self.sent)}"
        prefix = rng.choice(self.prefixes)
        ids = prefix[: rng.randrange(1, len(prefix) + 1)]
        ids = ids + [rng.randrange(50) for _ in range(rng.randrange(12))]
        params = SamplingParams(
            max_tokens=rng.randrange(40),
            min_tokens=rng.choice([0, 0, 5]),
            seed=rng.randrange(3),
            stop_token_ids=rng.choice([(), (1, 2)]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )
        starts = []
        for index in range(rng.choice([1, 1, 1, 2, 5])):
            output, _ = naive_output(ids, params, index, self.config.token_limit)
            resumed = rng.randrange(len(output) + 1) if rng.random() < 0.2 else 0
            starts.append(ChoiceStart(index, output[:resumed]))
        self.sent[name] = (ids, params)
        self.driver.add(name, ids, params, choices=starts, priority=rng.choice([0, 0, 1]))

    def abort(self) -> None:
        name, choice = self.rng.choice(list(self.driver.results))
        if self.rng.random() < 0.5:
            self.driver.abort(name)
        else:
            self.driver.abort(name, choice)

    def run(self) -> None:
        for _ in range(250):
            chance = self.rng.random()
            if chance < 0.2 and len(self.sent) < 40:
                self.send()
            elif chance < 0.23 and self.sent:
                self.abort()
            elif chance < 0.24:
                self.driver.reset_prefix_cache()
            elif self.driver.core.has_work:
                self.driver.step()
        self.driver.run()

    def check(self) -> None:
        load = self.driver.core.load()
        assert (load.running, load.waiting, load.running_tokens) == (0, 0, 0)
        assert load.queued_prefill_tokens == 0
        assert load.free_blocks + load.evictable_blocks == load.total_blocks
        broken = {name for name, _ in self.failing}
        for (name, choice), result in self.driver.results.items():
            ids, params = self.sent[name]
            expected, reason = naive_output(ids, params, choice, self.config.token_limit)
            if result.finish_reason is FinishReason.ERROR:
                fits = len(ids) + min(params.max_tokens, 1) <= self.config.token_limit
                assert not fits or name in broken
            elif result.finish_reason is not FinishReason.ABORT:
                assert (result.token_ids, result.finish_reason) == (expected, reason)
                if params.prompt_logprobs is not None and result.prompt_logprobs is not None:
                    assert result.prompt_logprobs == naive_prompt_logprobs(ids)
            assert result.token_ids == expected[: len(result.token_ids)]


@pytest.mark.parametrize("seed", range(30))
def test_every_request_ends_with_the_tokens_of_an_uncached_run(seed: int) -> None:
    workload = Workload(random.Random(seed))

    workload.run()

    workload.check()
