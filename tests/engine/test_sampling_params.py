"""A model's own sampling defaults, and how a request overrides them."""

from __future__ import annotations

import pytest

from kvoy_contract.openai import parse_completion
from kvoy_engine.sampling_params import ModelLimits, SamplingDefaults, sampling_params

CONFIG = {"do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": 0.1, "top_p": None}


def limits() -> ModelLimits:
    defaults = SamplingDefaults.from_generation_config(CONFIG)
    return ModelLimits(max_model_len=100, vocab_size=50, eos_token_ids=(2,), defaults=defaults)


def test_what_a_request_leaves_open_is_as_the_model_says() -> None:
    request = parse_completion(b'{"model": "m", "prompt": "x"}')

    params = sampling_params(request, 1, limits(), seed=0)

    assert (params.temperature, params.top_k, params.min_p, params.top_p) == (0.6, 20, 0.1, 1.0)


def test_a_request_overrides_the_model_also_with_zero() -> None:
    body = b'{"model": "m", "prompt": "x", "temperature": 0, "top_k": 0, "min_p": 0}'

    params = sampling_params(parse_completion(body), 1, limits(), seed=0)

    assert (params.temperature, params.top_k, params.min_p) == (0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("top_p", 3.0), ("top_k", "many"), ("repetition_penalty", 0)],
)
def test_a_default_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"generation_config\.json: .*{name}"):
        SamplingDefaults.from_generation_config({name: value})
