"""The core as its caller sees it: commands in, tokens, events and load out."""

from __future__ import annotations

from typing import Any

import pytest

from kvoy_engine.core import CoreConfig
from kvoy_engine.core_testing import CoreDriver, naive_output, naive_prompt_logprobs
from kvoy_engine.messages import ChoiceStart, ErrorKind, FinishReason, SamplingParams


def driver(
    num_blocks: int = 64, failing: tuple[tuple[str, int], ...] = (), **limits: Any
) -> CoreDriver:
    """Blocks of four tokens; every block is reported."""
    values: dict[str, Any] = {
        "max_model_len": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        **limits,
    }
    config = CoreConfig(num_blocks=num_blocks, block_size=4, hash_stride=4, **values)
    return CoreDriver(config, failing)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 50 for i in range(length)]


GREEDY = SamplingParams(max_tokens=10)


def test_a_request_gets_the_tokens_of_an_uncached_run() -> None:
    core = driver()

    core.add("a", prompt(13), GREEDY)
    core.run()

    result = core.result("a")
    assert (result.token_ids, result.finish_reason) == naive_output(prompt(13), GREEDY)
    assert result.finish_reason is FinishReason.LENGTH
    assert core.core.load().generated_tokens == 10


@pytest.mark.parametrize("length", [4, 8, 7, 9])
def test_a_prompt_that_is_all_in_the_cache_still_computes_its_last_token(length: int) -> None:
    core = driver()

    for name in "abc":
        core.add(name, prompt(length), GREEDY)
        core.run()

    expected, _ = naive_output(prompt(length), GREEDY)
    assert [core.result(name).token_ids for name in "abc"] == [expected] * 3
    hit = (length - 1) // 4 * 4
    assert [core.result(name).num_cached_tokens for name in "abc"] == [0, hit, hit]


def test_a_next_turn_finds_prompt_and_answer_of_the_last_one() -> None:
    core = driver()
    core.add("a", prompt(13), GREEDY)
    core.run()

    core.add("b", prompt(13) + core.result("a").token_ids + [1, 2, 3], GREEDY)
    core.run()

    # 22 of the first turn's 23 tokens have their KV computed: the last one was only sampled.
    assert core.result("b").num_cached_tokens == 20


def test_requests_of_different_seed_hashes_share_nothing() -> None:
    core = driver()

    core.add("a", prompt(13), GREEDY, seed_hash=b"a" * 16)
    core.run()
    core.add("b", prompt(13), GREEDY, seed_hash=b"b" * 16)
    core.run()

    assert core.result("b").num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_found_or_reported() -> None:
    core = driver(enable_prefix_caching=False)

    for name in "ab":
        core.add(name, prompt(13), GREEDY)
        core.run()

    assert core.result("b").num_cached_tokens == 0
    assert core.core.reported_hashes() == []
    assert core.core.load().free_blocks == 64


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    core = driver(max_num_batched_tokens=16)

    core.add("a", prompt(50), GREEDY)
    core.run()

    assert [step.num_batched_tokens for step in core.steps[:5]] == [16, 16, 16, 2, 1]
    assert core.result("a").token_ids == naive_output(prompt(50), GREEDY)[0]


def test_decodes_come_before_prefill_within_the_budget() -> None:
    core = driver(max_num_batched_tokens=16)
    core.add("a", prompt(5), GREEDY)
    core.step()

    core.add("b", prompt(50, 7), GREEDY)
    step = core.step()

    assert step.num_decodes == 1
    assert len(core.result("a").token_ids) == 2


def test_sibling_choices_compute_their_prompt_once() -> None:
    core = driver()
    starts = [ChoiceStart(i) for i in range(5)]

    core.add("a", prompt(42), GREEDY, choices=starts)
    core.run()

    for i in range(5):
        assert core.result("a", i).token_ids == naive_output(prompt(42), GREEDY, choice=i)[0]
    assert [core.result("a", i).num_cached_tokens for i in range(5)] == [0, 40, 40, 40, 40]
    load = core.core.load()
    assert (load.prompt_tokens, load.cached_tokens) == (42, 0)


def test_requests_with_one_prefix_wait_for_the_first_to_compute_it() -> None:
    core = driver(max_num_batched_tokens=16)
    document = prompt(40)

    core.add("a", [*document, 1], GREEDY)
    core.add("b", [*document, 2], GREEDY)
    core.add("other", prompt(8, 9), GREEDY)
    core.run()

    assert core.result("b").num_cached_tokens == 40
    assert core.result("other").queue_time_s < core.result("b").queue_time_s
    for name, last in (("a", 1), ("b", 2)):
        assert core.result(name).token_ids == naive_output([*document, last], GREEDY)[0]


def test_the_rest_of_a_prefix_is_computed_when_its_first_requester_leaves() -> None:
    core = driver(max_num_batched_tokens=16)
    core.add("a", [*prompt(40), 1], GREEDY)
    core.add("b", [*prompt(40), 2], GREEDY)
    core.step()

    core.abort("a")
    core.run()

    assert core.result("b").num_cached_tokens == 16
    assert core.result("b").token_ids == naive_output([*prompt(40), 2], GREEDY)[0]


def test_preempted_requests_resume_exactly() -> None:
    """A pool for about three of twelve requests that share a prefix."""
    core = driver(num_blocks=60, max_num_seqs=12)
    params = SamplingParams(max_tokens=60, logprobs=0)
    prompts = {f"r{i}": [*prompt(12), i, *prompt(7, i)] for i in range(12)}

    for name, ids in prompts.items():
        core.add(name, ids, params)
    core.run()

    load = core.core.load()
    assert load.num_preemptions > 0
    assert load.generated_tokens == 12 * 60
    for name, ids in prompts.items():
        result = core.result(name)
        assert result.token_ids == naive_output(ids, params)[0]
        assert [logprob.token_id for logprob in result.logprobs] == result.token_ids
    assert sum(core.result(name).num_preemptions for name in prompts) == load.num_preemptions


def test_admission_leaves_room_so_that_it_does_not_thrash() -> None:
    """Forty requests in room for five: each admission is followed by real progress."""
    core = driver(num_blocks=50, max_num_seqs=40)

    for i in range(40):
        core.add(f"r{i}", [i, *prompt(15, i)], SamplingParams(max_tokens=24))
    core.run()

    assert core.core.load().num_preemptions <= 20
    assert core.runner.num_computed_tokens <= 1.15 * 40 * (16 + 23)


def test_preemption_does_not_count_as_cache_hits() -> None:
    core = driver(num_blocks=40)

    for i in range(8):
        core.add(f"r{i}", [i, *prompt(20, i)], SamplingParams(max_tokens=60))
    core.run()

    load = core.core.load()
    assert load.num_preemptions > 0
    assert (load.prompt_tokens, load.cached_tokens) == (8 * 21, 0)
    assert all(result.num_cached_tokens == 0 for result in core.results.values())


def test_the_latest_request_of_the_lowest_priority_is_preempted() -> None:
    core = driver(num_blocks=12)
    params = SamplingParams(max_tokens=30)
    core.add("low", prompt(6), params, priority=5)
    core.add("first", prompt(6, 10), params)
    core.add("second", prompt(6, 20), params)
    while not core.core.load().num_preemptions:
        core.step()
    core.run()

    assert core.result("low").num_preemptions > 0
    assert core.result("first").num_preemptions == 0


def test_a_more_urgent_request_is_admitted_before_an_earlier_one() -> None:
    core = driver(max_num_seqs=1)
    core.add("running", prompt(5), GREEDY)
    core.step()

    core.add("early", prompt(6, 10), GREEDY)
    core.add("urgent", prompt(6, 20), GREEDY, priority=-1)
    core.run()

    assert core.result("urgent").queue_time_s < core.result("early").queue_time_s


@pytest.mark.parametrize("stage", range(8))
@pytest.mark.parametrize("choice", [None, 1])
def test_an_abort_frees_at_once_at_any_stage(stage: int, choice: int | None) -> None:
    core = driver(max_num_batched_tokens=16)
    core.add("other", prompt(9, 30), SamplingParams(max_tokens=40))
    core.add(
        "a", prompt(41), SamplingParams(max_tokens=40), choices=[ChoiceStart(i) for i in range(3)]
    )
    for _ in range(stage):
        core.step()

    core.abort("a", choice)

    assert core.result("a", 1).finish_reason is FinishReason.ABORT
    load = core.core.load()
    assert load.running + load.waiting == (1 if choice is None else 3)
    core.run()
    load = core.core.load()
    assert load.free_blocks + load.evictable_blocks == load.total_blocks
    assert (load.running_tokens, load.queued_prefill_tokens) == (0, 0)
    survivors = [] if choice is None else [0, 2]
    for i in survivors:
        assert core.result("a", i).finish_reason is FinishReason.LENGTH


def test_an_urgent_request_does_not_wait_for_the_work_of_a_lesser_one() -> None:
    core = driver(max_num_batched_tokens=16)
    core.add("patient", [*prompt(40), 1], GREEDY, priority=9)
    core.step()

    core.add("urgent", [*prompt(40), 2], GREEDY)
    core.run()

    assert core.result("urgent").queue_time_s == 0.0
    for name, last in (("patient", 1), ("urgent", 2)):
        assert core.result(name).token_ids == naive_output([*prompt(40), last], GREEDY)[0]


def test_an_abort_while_its_row_is_computed_is_harmless() -> None:
    core = driver()
    core.add("a", prompt(13), GREEDY)
    core.add("b", prompt(9, 20), GREEDY)
    batch = core.core.schedule(0.0)
    output = core.runner.run(batch)

    core.abort("a")
    step = core.core.update(batch, output, 0.1)

    assert [out.request_id for out in step.tokens] == ["b"]
    core.core.check_integrity()
    assert core.result("a").finish_reason is FinishReason.ABORT


def test_an_abort_of_an_unknown_request_does_nothing() -> None:
    core = driver()
    core.abort("nobody")
    core.add("a", prompt(5), GREEDY)
    core.abort("a", 7)
    core.run()
    core.abort("a")

    assert core.result("a").finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_a_sequence_and_is_its_last_token() -> None:
    core = driver()
    params = SamplingParams(max_tokens=200, stop_token_ids=(3, 4, 5))

    core.add("a", prompt(13), params)
    core.run()

    result = core.result("a")
    assert (result.token_ids, result.finish_reason) == naive_output(prompt(13), params)
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids[-1] in (3, 4, 5)


def test_a_sequence_ends_at_the_length_of_the_model() -> None:
    core = driver(max_model_len=32)

    core.add("a", prompt(13), SamplingParams(max_tokens=100))
    core.run()

    assert core.result("a").finish_reason is FinishReason.LENGTH
    assert len(core.result("a").token_ids) == 32 - 13


def test_a_sequence_that_fills_the_whole_pool_ends_with_length() -> None:
    core = driver(num_blocks=8)

    core.add("a", prompt(13), SamplingParams(max_tokens=100))
    core.add("b", prompt(13, 20), SamplingParams(max_tokens=100))
    core.run()

    for name, first in (("a", 0), ("b", 20)):
        assert len(core.result(name).token_ids) == 32 - 13
        expected = naive_output(prompt(13, first), SamplingParams(max_tokens=100), token_limit=32)
        assert core.result(name).token_ids == expected[0]


@pytest.mark.parametrize(("num_blocks", "holder"), [(64, "context"), (8, "KV cache")])
def test_a_request_that_can_never_fit_is_refused_at_once(num_blocks: int, holder: str) -> None:
    core = driver(num_blocks=num_blocks, max_model_len=100)

    core.add("a", prompt(100), GREEDY, router_id="router", number=4)

    assert core.result("a").finish_reason is FinishReason.ERROR
    assert core.result("a").error_kind is ErrorKind.TOO_LONG
    assert not core.core.has_work
    # A refused request is settled too, though no step follows.
    assert core.core.report(0.0).admitted == [("router", 4)]


def test_the_longest_request_that_fits_is_taken() -> None:
    core = driver(max_model_len=100)

    core.add("a", prompt(99), GREEDY)
    core.run()

    assert len(core.result("a").token_ids) == 1


def test_a_full_queue_refuses_further_requests() -> None:
    core = driver(max_num_seqs=1, max_waiting=2)
    core.add("running", prompt(5), GREEDY)
    core.step()
    core.add("a", prompt(5), GREEDY)
    core.add("b", prompt(5), GREEDY)

    core.add("c", prompt(5), GREEDY)

    assert core.result("c").error_kind is ErrorKind.SATURATED
    core.run()
    assert core.result("b").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("split", [1, 4, 9])
def test_a_request_goes_on_where_another_engine_left_it(split: int) -> None:
    core = driver()
    params = SamplingParams(max_tokens=10, seed=5)
    whole, _ = naive_output(prompt(13), params, choice=2)

    core.add("a", prompt(13), params, choices=[ChoiceStart(2, whole[:split])])
    core.run()

    assert core.result("a", 2).token_ids == whole
    assert core.core.load().generated_tokens == 10 - split
    assert core.core.load().prompt_tokens == 13


@pytest.mark.parametrize(
    ("output_ids", "reason"),
    [(list(range(10, 20)), FinishReason.LENGTH), ([10, 3], FinishReason.STOP)],
)
def test_a_choice_that_was_already_complete_ends_without_a_token(
    output_ids: list[int], reason: FinishReason
) -> None:
    core = driver()
    params = SamplingParams(max_tokens=10, stop_token_ids=(3,))

    core.add("a", prompt(13), params, choices=[ChoiceStart(0, output_ids), ChoiceStart(1)])

    assert core.result("a").finish_reason is reason
    assert core.result("a").token_ids == output_ids
    core.run()
    assert core.result("a", 1).token_ids == naive_output(prompt(13), params, choice=1)[0]


def test_a_choice_that_has_filled_the_models_length_ends_without_a_token() -> None:
    core = driver(max_model_len=20)
    output_ids = list(range(10, 17))

    core.add("a", prompt(13), GREEDY, choices=[ChoiceStart(0, output_ids)])

    assert core.result("a").finish_reason is FinishReason.LENGTH
    assert core.result("a").token_ids == output_ids


def test_prompt_logprobs_are_complete_over_chunks_and_despite_the_cache() -> None:
    core = driver(max_num_batched_tokens=16)
    core.add("first", prompt(41), GREEDY)
    core.run()
    params = SamplingParams(max_tokens=5, prompt_logprobs=0, logprobs=0)

    core.add("a", prompt(41), params, choices=[ChoiceStart(0), ChoiceStart(1)])
    core.run()

    assert core.result("a").prompt_logprobs == naive_prompt_logprobs(prompt(41))
    assert core.result("a").num_cached_tokens == 0
    assert core.result("a", 1).prompt_logprobs is None
    assert len(core.result("a").logprobs) == 5


def test_prompt_logprobs_are_complete_when_their_prefill_was_preempted() -> None:
    core = driver(num_blocks=22, interference_ratio=1.0001, min_chunk_tokens=1)
    core.add("streaming", prompt(20, 7), SamplingParams(max_tokens=60))
    core.step()

    core.add("a", prompt(41), SamplingParams(max_tokens=3, prompt_logprobs=0))
    core.run()

    assert core.result("a").num_preemptions > 0
    assert core.result("a").prompt_logprobs == naive_prompt_logprobs(prompt(41))
    assert core.result("a").token_ids == naive_output(prompt(41), SamplingParams(max_tokens=3))[0]


def test_a_request_for_no_tokens_scores_its_prompt() -> None:
    core = driver(max_num_batched_tokens=16)

    core.add("a", prompt(41), SamplingParams(max_tokens=0, prompt_logprobs=0))
    core.add("b", prompt(41), SamplingParams(max_tokens=0))
    core.run()

    for name in "ab":
        assert core.result(name).token_ids == []
        assert core.result(name).finish_reason is FinishReason.LENGTH
    assert core.result("a").prompt_logprobs == naive_prompt_logprobs(prompt(41))
    assert core.core.load().generated_tokens == 0


@pytest.mark.parametrize("position", [0, 5])
def test_a_broken_row_ends_its_request_alone_and_leaves_nothing_in_the_cache(position: int) -> None:
    core = driver(failing=(("bad", position),))
    params = SamplingParams(max_tokens=12)
    for i in range(3):
        core.add(f"good{i}", prompt(9, 10 * i), params)
    core.add("bad", prompt(13, 40), params, choices=[ChoiceStart(0), ChoiceStart(1)])
    core.run()

    for choice in range(2):
        assert core.result("bad", choice).finish_reason is FinishReason.ERROR
        assert core.result("bad", choice).error_kind is ErrorKind.BROKEN
    for i in range(3):
        assert core.result(f"good{i}").token_ids == naive_output(prompt(9, 10 * i), params)[0]

    core.add("again", prompt(13, 40), params)
    core.run()
    assert core.result("again").num_cached_tokens == 0
    assert core.result("again").token_ids == naive_output(prompt(13, 40), params)[0]


def test_a_reset_keeps_running_requests_right_and_clears_what_routers_know() -> None:
    core = driver()
    core.add("old", prompt(13), GREEDY)
    core.run()
    core.add("running", prompt(13, 20), GREEDY)
    core.step()

    core.reset_prefix_cache()
    step = core.step()

    assert step.events.cleared
    assert len(core.known_hashes) == 3
    core.run()
    core.add("old again", prompt(13), GREEDY)
    core.run()
    assert core.result("old again").num_cached_tokens == 0
    assert core.result("running").token_ids == naive_output(prompt(13, 20), GREEDY)[0]


def test_the_load_counts_what_is_queued_running_and_held() -> None:
    core = driver(max_num_seqs=2, max_num_batched_tokens=16)
    core.add("cached", prompt(13), SamplingParams(max_tokens=1))
    core.run()

    core.add("a", prompt(41, 20), GREEDY)
    core.add("b", prompt(13), GREEDY)
    load = core.core.load()
    assert (load.running, load.waiting) == (0, 2)
    assert load.queued_prefill_tokens == 41 + 1
    assert load.evictable_blocks == 3

    core.step()
    load = core.core.load()
    assert (load.running, load.waiting) == (1, 1)
    assert load.queued_prefill_tokens == 41 - 16 + 1
    assert load.running_tokens == 16
    assert load.free_blocks == 64 - 3 - 11


def test_each_number_of_a_router_is_admitted_once() -> None:
    core = driver()
    core.add("a", prompt(5), GREEDY, router_id="r", number=1)
    core.add("b", prompt(5), GREEDY, router_id="s", number=9)
    core.add("own", prompt(5), GREEDY)

    first, second = core.step(), core.step()

    assert first.admitted == [("r", 1), ("s", 9)]
    assert second.admitted == []


def test_a_live_request_id_cannot_be_used_twice() -> None:
    core = driver()
    core.add("a", prompt(5), GREEDY)

    with pytest.raises(ValueError, match="request a is already here"):
        core.add("a", prompt(5), GREEDY)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"hash_stride": 6}, "hash_stride"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
    ],
)
def test_impossible_limits_are_refused_by_name(limits: dict[str, int], name: str) -> None:
    values: dict[str, Any] = {"num_blocks": 8, "max_model_len": 100, "block_size": 4} | limits

    with pytest.raises(ValueError, match=name):
        CoreConfig(**values)
