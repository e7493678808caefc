"""How much memory the KV blocks get on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoy_engine import model_runner
from kvoy_engine.batch import RunnerInfo
from kvoy_engine.limits import HostMemory
from kvoy_engine.model_runner import RunnerOptions, load_runner
from kvoy_engine.testing import write_tiny_model

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
