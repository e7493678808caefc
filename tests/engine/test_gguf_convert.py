"""GGUF files become model folders whose values and names are those of the original checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from safetensors.numpy import load_file

from kvoy_engine import gguf_testing
from kvoy_engine.gguf_convert import (
    choose_dtype,
    convert,
    llama3_factors,
    model_config,
    open_gguf,
    plan_tensors,
    restore_rotary_order,
)
from kvoy_engine.gguf_testing import HEADS, write_tiny_gguf
from kvoy_engine.model_errors import ModelSourceError
from kvoy_engine.safetensors_writer import (
    LazyTensor,
    encode_values,
    to_bfloat16_bits,
    write_safetensors,
)


def convert_to(folder: Path, gguf: Path, dtype: str = "auto") -> dict[str, Any]:
    """Convert, and return `config.json`."""
    folder.mkdir()
    file = open_gguf(gguf)
    convert(file, folder, choose_dtype(file) if dtype == "auto" else dtype, lambda fraction: None)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_restoring_the_rotary_order_undoes_llama_cpp_s_permutation() -> None:
    rows = np.arange(64 * 3, dtype=np.float32).reshape(64, 3)

    permuted = gguf_testing.permute_rows(rows, HEADS)

    assert not np.array_equal(permuted, rows)
    assert np.array_equal(restore_rotary_order(permuted, HEADS), rows)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_tensor_has_its_checkpoint_name_and_its_dequantised_values(
    tmp_path: Path, architecture: str
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture, tied=False)

    config = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    source = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "tiny.gguf").tensors}
    down = source["blk.1.ffn_down.weight"]
    query = dequantize(
        source["blk.0.attn_q.weight"].data, source["blk.0.attn_q.weight"].tensor_type
    )
    if architecture == "llama":
        query = restore_rotary_order(query, HEADS)
    assert np.array_equal(
        tensors["model.layers.1.mlp.down_proj.weight"], dequantize(down.data, down.tensor_type)
    )
    assert np.array_equal(tensors["model.layers.0.self_attn.q_proj.weight"], query)
    assert len(tensors) == len(source)
    assert config["model_type"] == architecture
    assert config["tie_word_embeddings"] is False
    assert ("model.layers.0.self_attn.q_proj.bias" in tensors) == (architecture == "qwen2")
    assert ("model.layers.0.self_attn.q_norm.weight" in tensors) == (architecture == "qwen3")


def test_the_configuration_says_what_the_file_says(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")

    config = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    assert config["head_dim"] == gguf_testing.HEAD_DIM
    assert config["num_key_value_heads"] == gguf_testing.KV_HEADS
    assert config["max_position_embeddings"] == gguf_testing.CONTEXT
    assert config["rms_norm_eps"] == 1e-6
    assert config["rope_theta"] == 10000.0
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 0
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 0


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F32, "float32"),
        (GGMLQuantizationType.F16, "float16"),
        (GGMLQuantizationType.BF16, "bfloat16"),
        (GGMLQuantizationType.Q8_0, "float32"),
        (GGMLQuantizationType.Q4_1, "float32"),
    ],
)
def test_weights_are_stored_in_the_smallest_type_that_keeps_them(
    tmp_path: Path, kind: GGMLQuantizationType, dtype: str
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", kind=kind)
    file = open_gguf(tmp_path / "tiny.gguf")

    chosen = choose_dtype(file)
    planned = {tensor.name: tensor for tensor in plan_tensors(file, chosen)}

    stored = planned["model.layers.0.mlp.up_proj.weight"]
    source = file.tensors["blk.0.ffn_up.weight"]
    exact = dequantize(source.data, source.tensor_type)
    values = encode_values(stored)
    if dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    assert chosen == dtype
    assert planned["model.norm.weight"].dtype == "F32"
    assert np.array_equal(values.astype(np.float32), exact)


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, 1.005, -2.0, np.inf, np.nan], np.float32)

    rounded = (to_bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)

    assert rounded[:6].tolist() == [1.0, 1.0, 1.015625, 1.0078125, -2.0, np.inf]
    assert np.isnan(rounded[6])


def test_a_written_file_is_a_safetensors_file(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = [
        LazyTensor("a", "F32", (2, 3), lambda: values),
        LazyTensor("b", "F16", (3,), lambda: values[1]),
    ]
    written: list[int] = []

    write_safetensors(tmp_path / "x.safetensors", tensors, written.append)

    loaded = load_file(tmp_path / "x.safetensors")
    assert np.array_equal(loaded["a"], values)
    assert loaded["b"].dtype == np.float16
    assert written == [24, 30]


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(ModelSourceError, match="gemma3"):
        open_gguf(tmp_path / "other.gguf")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_cut_file_is_refused(tmp_path: Path, share: float) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * share)])

    with pytest.raises(ModelSourceError, match=r"cut\.gguf"):
        open_gguf(tmp_path / "cut.gguf")


def test_llama_3_scaling_is_recovered_from_its_frequency_factors(tmp_path: Path) -> None:
    published = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    write_tiny_gguf(tmp_path / "tiny.gguf")
    file = open_gguf(tmp_path / "tiny.gguf")
    file.metadata["llama.rope.freq_base"] = 500000.0

    file.tensors["rope_freqs.weight"] = vector(llama3_factors(500000.0, 128, published))
    recovered = model_config(file, "float32")["rope_scaling"]
    file.tensors["rope_freqs.weight"] = vector([3.0] * 64)

    assert recovered == published | {"factor": pytest.approx(8.0, rel=1e-6)}
    with pytest.raises(ModelSourceError, match="frequency factors"):
        model_config(file, "float32")


def vector(values: list[float]) -> Any:
    """What the conversion reads of a one-dimensional float32 tensor."""
    return SimpleNamespace(data=np.array(values, np.float32), tensor_type=GGMLQuantizationType.F32)
