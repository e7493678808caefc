"""The smoke test for machines with a GPU, as far as one without can run it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvoy_engine import gpu_smoke
from kvoy_engine.comparator import Exactness, Reference, compare_tokens, margins
from kvoy_engine.model_runner import RunnerOptions, load_runner
from kvoy_engine.testing import write_tiny_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_smoke.main([]) == 1
    assert "no usable CUDA device" in capsys.readouterr().err


def test_its_batched_generation_equals_teacher_forcing(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    options = RunnerOptions(dtype="float64", num_blocks=40)
    runner = load_runner(folder, options, lambda _: None)
    prompts = [[1, 2, 3], list(range(60))]

    for prompt, token_ids in zip(prompts, gpu_smoke.generate(runner, prompts, 8), strict=True):
        logits = runner.logits([*prompt, *token_ids], range(40))[len(prompt) - 1 : -1]
        reference = Reference(logits.argmax(dim=-1).tolist(), margins(logits))
        assert compare_tokens(reference, token_ids, Exactness.EXACT).is_equal


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_device_equals_the_cpu() -> None:
    assert gpu_smoke.main([]) == 0
