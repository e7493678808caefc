"""Turns a GGUF file into a model folder: config, tokenizer and one safetensors file.

Weights keep the values that the GGUF library gives them: quantised tensors become float32, files of
one 16-bit type stay in it; `dtype` may ask for less. llama.cpp stores the query and key rows of the
`llama` architecture in its own order for rotary embedding; they are put back. transformers is not
needed.

Knows files and arrays; knows neither the model store's folders nor torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize

from kvoy_engine.gguf_tokenizer import special_id, tokenizer_config, tokenizer_json
from kvoy_engine.model_errors import ModelSourceError
from kvoy_engine.safetensors_writer import Array, LazyTensor, write_safetensors

STORED_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Mistral's GGUF files say `llama`: the shape is the same."""

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DERIVED_TENSORS = frozenset({"rope_freqs.weight"})
"""Not weights: what `rope_scaling` in the config says, as numbers."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF that was opened and whose architecture Kvoy knows."""

    path: Path
    metadata: dict[str, Any]
    """Every key of the file, as plain values."""
    tensors: dict[str, ReaderTensor]
    """By the file's own names; memory-mapped."""

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def value(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own keys, e.g. `block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        value = self.value(key)
        if value is None:
            raise ModelSourceError(f"{self.path} lacks the key {self.architecture}.{key}")
        return value


def open_gguf(path: Path) -> GgufFile:
    """Read the header and map the tensors.

    Raises ModelSourceError for a broken file or an architecture outside the Llama shape.
    """
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, KeyError, IndexError, UnicodeDecodeError, OverflowError) as error:
        raise ModelSourceError(f"{path} is not a whole GGUF file: {error}") from error
    file = GgufFile(path, metadata, tensors)
    if metadata.get("general.architecture") not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelSourceError(
            f"{path} has the architecture {metadata.get('general.architecture')!r}; "
            f"Kvoy reads {known} (Mistral's files say llama)"
        )
    if file.value("expert_count", 0):
        raise ModelSourceError(f"{path} is a mixture of experts, which Kvoy does not read")
    return file


def choose_dtype(file: GgufFile) -> str:
    """The smallest type of `STORED_DTYPES` that holds the file's matrices exactly."""
    kinds = {tensor.tensor_type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {GGMLQuantizationType.F16}:
        return "float16"
    if kinds == {GGMLQuantizationType.BF16}:
        return "bfloat16"
    return "float32"


def plan_tensors(file: GgufFile, dtype: str) -> list[LazyTensor]:
    """The tensors to write, with the names of a Hugging Face folder. Vectors stay float32.

    Raises ModelSourceError for a tensor that has no place in the Llama shape, or a missing one.
    """
    planned = []
    for name, tensor in file.tensors.items():
        if name in _DERIVED_TENSORS:
            continue
        shape = tuple(int(extent) for extent in reversed(tensor.shape))
        stored = STORED_DTYPES[dtype] if len(shape) > 1 else "F32"
        load = _loader(file, name, tensor, stored)
        planned.append(LazyTensor(_hf_name(file.path, name), stored, shape, load))
    present = {tensor.name for tensor in planned}
    for layer in range(file.require("block_count")):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down"):
            needed = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
            if needed not in present:
                raise ModelSourceError(f"{file.path} lacks the tensor blk.{layer}.{part}.weight")
    return planned


def _loader(file: GgufFile, name: str, tensor: ReaderTensor, stored: str) -> Callable[[], Array]:
    heads = _permuted_heads(file, name)

    def load() -> Array:
        if stored == "BF16" and tensor.tensor_type == GGMLQuantizationType.BF16:
            values: Array = np.ascontiguousarray(tensor.data).view(np.uint16)
        else:
            values = dequantize(tensor.data, tensor.tensor_type)
        return values if heads is None else restore_rotary_order(values, heads)

    return load


def _permuted_heads(file: GgufFile, name: str) -> int | None:
    """The number of heads whose rows llama.cpp reordered in this tensor, or None."""
    if file.architecture != "llama":
        return None
    num_heads = int(file.require("attention.head_count"))
    if ".attn_q." in name:
        return num_heads
    if ".attn_k." in name:
        return int(file.value("attention.head_count_kv", num_heads))
    return None


def restore_rotary_order(values: Array, num_heads: int) -> Array:
    """Undo llama.cpp's interleaving: rows (head, pair, half) become (head, half, pair)."""
    half = values.shape[0] // num_heads // 2
    split = values.reshape(num_heads, half, 2, *values.shape[1:])
    restored: Array = split.swapaxes(1, 2).reshape(values.shape)
    return restored


def _hf_name(path: Path, name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if suffix in ("weight", "bias"):
        if stem in _TOP_NAMES:
            return f"{_TOP_NAMES[stem]}.{suffix}"
        block, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if block == "blk" and part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"
    raise ModelSourceError(f"{path} has the tensor {name}, which Kvoy's decoders do not use")


def model_config(file: GgufFile, dtype: str) -> dict[str, Any]:
    """The content of `config.json`."""
    num_heads = int(file.require("attention.head_count"))
    hidden_size = int(file.require("embedding_length"))
    rope_size = int(file.value("rope.dimension_count", hidden_size // num_heads))
    config = {
        "architectures": [_ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(file.require("feed_forward_length")),
        "num_hidden_layers": int(file.require("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(file.value("attention.head_count_kv", num_heads)),
        "head_dim": int(file.value("attention.key_length", rope_size)),
        "max_position_embeddings": int(file.require("context_length")),
        "rms_norm_eps": _short_decimal(file.require("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short_decimal(file.value("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "dtype": dtype,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = special_id(file.metadata, key)
    return config


def _short_decimal(value: float) -> float:
    """The decimal that a float32 of the file stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    kind = file.value("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file)
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": _short_decimal(file.require("rope.scaling.factor"))}
    original = file.value("rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _llama3_scaling(file: GgufFile) -> dict[str, Any]:
    """Llama 3.1's scaling, recovered from the frequency factors that llama.cpp stores instead.

    The file lacks the parameters: those that Llama publishes are tried, and must give its factors.
    """
    tensor = file.tensors["rope_freqs.weight"]
    factors = dequantize(tensor.data, tensor.tensor_type).reshape(-1)
    theta = float(file.value("rope.freq_base", 10000.0))
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(factors, llama3_factors(theta, 2 * factors.size, scaling), rtol=1e-4):
        raise ModelSourceError(
            f"{file.path} has rope frequency factors that are not those of Llama 3.1"
        )
    return scaling


def llama3_factors(theta: float, size: int, scaling: dict[str, Any]) -> list[float]:
    """What each of the `size / 2` rotary frequencies is divided by."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(0, size, 2):
        turns = original / (2 * math.pi * theta ** (index / size))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The content of `generation_config.json`: every token that ends an answer."""
    ends = [special_id(metadata, key) for key in ("eos", "eot")]
    eos_ids = sorted({end for end in ends if end is not None})
    return {
        "bos_token_id": special_id(metadata, "bos"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "pad_token_id": special_id(metadata, "padding"),
    }


def convert(file: GgufFile, folder: Path, dtype: str, on_fraction: Callable[[float], None]) -> None:
    """Write the model folder's files into the existing, empty `folder`.

    `dtype` is a key of STORED_DTYPES. An interrupted conversion leaves files in `folder`, never a
    folder that looks whole to the model store, which renames it afterwards.
    """
    tensors = plan_tensors(file, dtype)
    total = sum(tensor.num_bytes for tensor in tensors)
    contents = {
        "config.json": model_config(file, dtype),
        "generation_config.json": generation_config(file.metadata),
        "tokenizer.json": tokenizer_json(file.metadata),
        "tokenizer_config.json": tokenizer_config(file.metadata),
    }
    for name, content in contents.items():
        indent = None if name == "tokenizer.json" else 2
        text = json.dumps(content, ensure_ascii=False, indent=indent)
        (folder / name).write_text(text, encoding="utf-8")
    write_safetensors(
        folder / "model.safetensors", tensors, lambda written: on_fraction(written / total)
    )
