"""The own decoder against transformers, family by family, on tiny random models."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from kvoy_engine.comparator import compare_logits
from kvoy_engine.model_config import load_model_config
from kvoy_engine.model_runner import RunnerOptions, load_runner
from kvoy_engine.rope import inverse_frequencies
from kvoy_engine.testing import Kind, write_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, sharded": ("llama", {"tie_word_embeddings": True, "num_shards": 3}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "mistral, windowed": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2, later layers windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
}
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(150)]


def oracle_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """transformers' logits; in float64 its float32 islands (norms, rotation) are float64 too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the import are not ours
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        )
    model.eval()
    if dtype is torch.float64:
        _widen(model, folder)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def _widen(model: Any, folder: Path) -> None:
    config = load_model_config(folder)
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    torch.testing.assert_close(
        model.model.rotary_emb.inv_freq.double(), frequencies, rtol=1e-5, atol=0
    )

    def rotation(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids.double()[..., None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def norm(weight: torch.Tensor, eps: float) -> Any:
        return lambda x: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    model.model.rotary_emb.forward = rotation
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module.weight, module.variance_epsilon)


def write_case(path: Path, case: str) -> Path:
    kind, overrides = CASES[case]
    return write_tiny_model(path, kind, seed=11, **overrides)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_float64_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    folder = write_case(tmp_path, case)
    runner = load_runner(folder, RunnerOptions(dtype="float64", num_blocks=16), lambda _: None)

    comparison = compare_logits(
        oracle_logits(folder, torch.float64), runner.logits(PROMPT, range(16))
    )

    assert comparison.max_difference < 1e-9, comparison
    assert comparison.top1_agreement == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_float32_logits_are_those_of_transformers(tmp_path: Path, case: str, kernels: Any) -> None:
    folder = write_case(tmp_path, case)
    options = RunnerOptions(dtype="float32", num_blocks=16, kernels=kernels)
    runner = load_runner(folder, options, lambda _: None)

    comparison = compare_logits(
        oracle_logits(folder, torch.float32), runner.logits(PROMPT, range(16))
    )

    assert comparison.is_float32_equal, comparison
