"""The batched sampler against a plain reading of each parameter, row by row."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from kvoy_engine.batch import Row
from kvoy_engine.messages import SamplingParams
from kvoy_engine.randomness import uniform
from kvoy_engine.sampler import NOT_FINITE, NOTHING_ALLOWED, sample

VOCAB_SIZE = 50


def row(
    params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = ()
) -> Row:
    return Row(
        seq_id=0,
        token_ids=(0,),
        start=0,
        block_table=(0,),
        samples=True,
        params=params,
        choice=params.seed % 3,
        prompt_ids=prompt,
        output_ids=output,
    )


def brute_force(logits: list[float], each: Row) -> int:
    """Everything in Python floats, one token after another."""
    params, values = each.params, list(logits)
    for token in set(each.prompt_ids) | set(each.output_ids):
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(each.output_ids):
        count = list(each.output_ids).count(token)
        values[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        values[token] += bias
    banned = set(params.banned_token_ids)
    if len(each.output_ids) < params.min_tokens:
        banned |= set(params.stop_token_ids)
    for token in banned:
        values[token] = -math.inf
    if params.temperature == 0.0:
        return values.index(max(values))

    highest = max(values)
    weights = {t: math.exp((v - highest) / params.temperature) for t, v in enumerate(values)}
    ranked = sorted(weights, key=lambda token: -weights[token])
    if params.top_k:
        ranked = ranked[: params.top_k]
    total = sum(weights[token] for token in ranked)
    nucleus, mass = [], 0.0
    for token in ranked:
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    kept = sorted(token for token in nucleus if weights[token] >= params.min_p)
    target = uniform(params.seed, each.choice, len(each.output_ids))
    target *= sum(weights[token] for token in kept)
    mass = 0.0
    for token in kept:
        mass += weights[token]
        if mass > target:
            return token
    return kept[-1]


def random_row(chance: random.Random) -> Row:
    def maybe(value: Any, otherwise: Any) -> Any:
        return value if chance.random() < 0.4 else otherwise

    params = SamplingParams(
        max_tokens=20,
        min_tokens=chance.choice([0, 0, 5]),
        temperature=chance.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=maybe(chance.uniform(0.05, 0.99), 1.0),
        top_k=maybe(chance.randint(1, VOCAB_SIZE + 5), 0),
        min_p=maybe(chance.uniform(0.01, 0.5), 0.0),
        presence_penalty=maybe(chance.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(chance.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(chance.uniform(0.5, 2), 1.0),
        logit_bias=maybe({chance.randrange(VOCAB_SIZE): chance.uniform(-5, 5)}, {}),
        banned_token_ids=maybe((chance.randrange(VOCAB_SIZE),), ()),
        stop_token_ids=tuple(chance.sample(range(VOCAB_SIZE), 4)),
        logprobs=maybe(chance.randint(0, 5), None),
        seed=chance.randrange(2**64),
    )
    output = tuple(chance.choices(range(VOCAB_SIZE), k=chance.randint(0, 12)))
    return row(params, tuple(chance.choices(range(VOCAB_SIZE), k=6)), output)


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_gives_what_a_plain_reading_gives(seed: int) -> None:
    chance = random.Random(seed)
    rows = [random_row(chance) for _ in range(24)]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(24, VOCAB_SIZE, generator=generator, dtype=torch.float64) * 3
    expected = [brute_force(logits[i].tolist(), each) for i, each in enumerate(rows)]

    outputs = sample(logits.clone(), rows)

    assert [output.token_id for output in outputs] == expected


def test_a_row_is_independent_of_its_neighbours_and_their_order() -> None:
    chance = random.Random(99)
    rows = [random_row(chance) for _ in range(12)]
    logits = torch.randn(12, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(12)]

    for _ in range(4):
        order = chance.sample(range(12), chance.randint(2, 12))
        together = sample(logits[order].clone(), [rows[i] for i in order])
        assert together == [alone[i] for i in order]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    for broken_value in (math.nan, math.inf, -math.inf):
        logits = torch.randn(4, VOCAB_SIZE)
        logits[2, 7] = broken_value
        rows = [row(SamplingParams(max_tokens=5, temperature=t)) for t in (0.0, 1.0, 1.0, 0.0)]

        outputs = sample(logits, rows)

        assert [output.error for output in outputs] == [None, None, NOT_FINITE, None]
        assert outputs[2].token_id is None


def test_a_row_with_every_token_banned_fails_alone() -> None:
    everything = tuple(range(VOCAB_SIZE))
    params = [
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=5, banned_token_ids=everything),
    ]

    outputs = sample(torch.randn(2, VOCAB_SIZE), [row(each) for each in params])

    assert [output.error for output in outputs] == [None, NOTHING_ALLOWED]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(1, VOCAB_SIZE)
    expected = torch.log_softmax(logits, dim=-1)[0]
    params = SamplingParams(
        max_tokens=5, temperature=0.0, logprobs=3, logit_bias={4: 100.0}, repetition_penalty=1.8
    )

    (output,) = sample(logits.clone(), [row(params)])

    assert output.token_id == 4
    assert output.logprob is not None
    assert output.logprob.logprob == pytest.approx(float(expected[4]))
    assert [token for token, _ in output.logprob.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in output.logprob.top] == pytest.approx(
        expected.topk(3).values.tolist()
    )


def test_the_random_number_is_a_golden_function_of_seed_choice_and_position() -> None:
    assert uniform(0, 0, 0) == 0.0564663990004608
    assert (
        len({uniform(seed, choice, at) for seed in (0, 1) for choice in (0, 1) for at in (0, 1)})
        == 8
    )
    numbers = [uniform(2**64 - 1, 2**32 - 1, position) for position in range(1000)]
    assert all(0.0 <= number < 1.0 for number in numbers)


@pytest.mark.parametrize("temperature", [1e-5, 1e-9, 1e-30, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_an_extremely_low_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.randn(8, VOCAB_SIZE) * 50
    rows = [
        row(SamplingParams(max_tokens=5, temperature=temperature, top_p=top_p, seed=i))
        for i in range(8)
    ]

    outputs = sample(logits.clone(), rows)

    assert [output.token_id for output in outputs] == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1e-17, 1e-9, 0.5, 1.0 - 1e-16])
@pytest.mark.parametrize("top_k", [0, 1, 2, VOCAB_SIZE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_at_their_ends_leave_the_best_token(
    top_p: float, top_k: int, dtype: torch.dtype
) -> None:
    uniform_row, peaked = torch.zeros(VOCAB_SIZE), torch.randn(VOCAB_SIZE) * 50
    logits = torch.stack([uniform_row, peaked]).to(dtype)
    params = SamplingParams(
        max_tokens=5, temperature=1.0, top_p=top_p, top_k=top_k, min_p=1.0, seed=7
    )

    outputs = sample(logits.clone(), [row(params), row(params)])

    assert outputs[0].token_id is not None
    assert outputs[1].token_id == int(peaked.argmax())


def test_an_edit_that_leaves_no_finite_number_fails_its_row_alone() -> None:
    logits = torch.ones(2, VOCAB_SIZE)
    logits[0, 3] = torch.finfo(torch.float32).max
    penalised = SamplingParams(max_tokens=5, temperature=1.0, repetition_penalty=0.01)
    plain = SamplingParams(max_tokens=5, temperature=1.0)

    broken, whole = sample(logits, [row(penalised, prompt=(3,)), row(plain)])

    assert broken.error == NOT_FINITE
    assert whole.token_id is not None


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_frequencies_of_many_draws_are_the_distribution(temperature: float) -> None:
    num_draws, vocab_size = 20_000, 8
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, -2.0])
    params = [
        SamplingParams(max_tokens=1, temperature=temperature, seed=i) for i in range(num_draws)
    ]

    outputs = sample(logits.repeat(num_draws, 1), [row(each) for each in params])

    counts = np.bincount([output.token_id or 0 for output in outputs], minlength=vocab_size)
    expected = torch.softmax(logits / temperature, dim=-1).numpy() * num_draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 24.3  # 0.1 % quantile at 7 degrees of freedom; the seeds are fixed
