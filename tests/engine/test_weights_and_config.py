"""What a model folder may hold, and how what is wrong with it is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvoy_engine.identity import model_identity
from kvoy_engine.model_config import ModelError, UnsupportedModel, load_model_config
from kvoy_engine.model_runner import RunnerOptions, load_runner
from kvoy_engine.testing import write_tiny_model
from kvoy_engine.weights import WeightsError


def load(folder: Path, **options: Any) -> Any:
    chosen: dict[str, Any] = {"dtype": "float32", "num_blocks": 8, "kernels": "torch"}
    return load_runner(folder, RunnerOptions(**chosen | options), lambda _: None)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": []}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"rope_interleaved": True}, "rope_interleaved"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = write_tiny_model(tmp_path)
    edit_config(folder, **changes)

    with pytest.raises(UnsupportedModel, match=named):
        load_model_config(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"eos_token_id": "two"}, "two"),
    ],
)
def test_a_malformed_config_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "generation_config.json").unlink()
    edit_config(folder, **changes)

    with pytest.raises(ModelError, match=named):
        load_model_config(folder)


def test_the_older_spelling_of_rope_scaling_means_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = write_tiny_model(tmp_path / "old", rope_scaling={"type": "llama3"} | scaling)
    new = write_tiny_model(
        tmp_path / "new",
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0} | scaling,
    )

    assert load_model_config(old).rope == load_model_config(new).rope


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)

    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(folder)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, path)

    with pytest.raises(WeightsError, match=r"unexpected tensors .*q_proj\.bias"):
        load(folder)


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(63)}, path)

    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape \(63,\)"):
        load(folder)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()

    with pytest.raises(WeightsError, match="model-00002-of-00003"):
        load(folder)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(WeightsError, match=r"model\.safetensors is not a readable"):
        load(folder)


def test_a_weight_beyond_float16_is_refused_there_and_taken_in_float32(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 3] = 1e5
    save_file(tensors, path)

    with pytest.raises(WeightsError, match="down_proj"):
        load(folder, dtype="float16")
    load(folder, dtype="float32")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"max_model_len": 100_000}, "limit is 1024"),
        ({"max_model_len": 1000}, "hold 128 tokens"),
        ({"num_blocks": None, "kv_cache_memory_bytes": 10}, "one block takes"),
        ({"device": "tpu"}, "tpu"),
        ({"dtype": "float64", "kernels": "native"}, "float64"),
    ],
)
def test_options_that_cannot_be_met_are_named(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    folder = write_tiny_model(tmp_path)

    with pytest.raises((ValueError, ModelError, RuntimeError), match=named):
        load(folder, **options)


def test_identity_follows_the_bytes_and_not_the_folder(tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "a", seed=1)
    same = write_tiny_model(tmp_path / "b", seed=1)
    other = write_tiny_model(tmp_path / "c", seed=2)

    assert model_identity(first) == model_identity(same)
    assert model_identity(first) != model_identity(other)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_blocks_take_memory_only_when_written(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    before = resident_bytes()

    runner = load(folder, num_blocks=None, kv_cache_memory_bytes=1 << 30)

    assert runner.info.num_blocks == (1 << 30) // runner.info.block_bytes
    assert resident_bytes() - before < 256 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_more_blocks_than_the_system_has_memory_for_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)

    with pytest.raises(ValueError, match="does not give"):
        load(folder, num_blocks=None, kv_cache_memory_bytes=1 << 60)
