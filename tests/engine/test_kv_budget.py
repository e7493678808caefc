"""How much memory the KV blocks get without a GPU, and how its lack is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvoy_contract.host_limits import HostMemory
from kvoy_engine import model_runner
from kvoy_engine.batch import RunnerInfo
from kvoy_engine.build import build_core, is_out_of_memory
from kvoy_engine.model_runner import RunnerOptions, load_runner
from kvoy_engine.testing import write_tiny_model
from kvoy_engine.testing_server import sim_config

MIB = 1 << 20


@pytest.fixture
def small_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 400 MiB of which 100 are taken."""
    monkeypatch.setattr(model_runner, "host_memory", lambda: HostMemory(400 * MIB, 300 * MIB))


def load(folder: Path, share: float | None) -> RunnerInfo:
    options = RunnerOptions(kernels="torch", gpu_memory_utilization=share, max_num_batched_tokens=8)
    return load_runner(write_tiny_model(folder), options, lambda text: None).info


@pytest.mark.usefixtures("small_container")
def test_the_share_of_memory_is_that_of_the_containers_limit(tmp_path: Path) -> None:
    info = load(tmp_path, 0.75)

    num_bytes = info.num_blocks * info.block_bytes
    assert 190 * MIB < num_bytes <= 200 * MIB, "three quarters of 400, less what is taken"


@pytest.mark.usefixtures("small_container")
def test_without_a_share_it_is_a_quarter_of_what_is_free(tmp_path: Path) -> None:
    info = load(tmp_path, None)

    assert 75 * MIB - info.block_bytes < info.num_blocks * info.block_bytes <= 75 * MIB


@pytest.mark.usefixtures("small_container")
def test_a_share_that_is_taken_already_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="out of memory"):
        load(tmp_path, 0.2)


def test_torchs_words_for_a_lack_of_memory_are_known() -> None:
    with pytest.raises(RuntimeError) as lack:
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)

    assert is_out_of_memory(lack.value)
    assert not is_out_of_memory(other.value)


@pytest.mark.parametrize(("share", "num_blocks"), [(None, 4096), (0.9, 4096), (0.45, 2048)])
def test_a_simulated_engine_has_blocks_in_proportion(share: float | None, num_blocks: int) -> None:
    config = sim_config(gpu_memory_utilization=share)

    assert build_core(config, lambda text: None).info.runner.num_blocks == num_blocks
