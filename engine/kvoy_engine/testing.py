"""Tiny random models in the folder form of real ones, for tests of every component.

The tokenizer is byte-level BPE without merges (ids 0..255 are bytes, then the special tokens), so
any text encodes, and ids and bytes correspond one to one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from kvoy_engine.model_config import ModelConfig, parse_model_config

Kind = Literal["llama", "mistral", "qwen2", "qwen3"]

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
VOCAB_SIZE = 320
"""More than the tokenizer has, as in real checkpoints."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write_tiny_model(
    path: Path,
    kind: Kind = "llama",
    seed: int = 0,
    *,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    **overrides: Any,
) -> Path:
    """Write a random model of a family with its tokenizer; `overrides` are fields of `config.json`.

    A `scale` this large makes next tokens differ clearly, so that greedy runs are not decided by
    rounding. Returns `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    raw = _config(kind, dtype) | overrides
    config = parse_model_config(raw, {})
    (path / "config.json").write_text(json.dumps(raw, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    _write_tokenizer(path)
    _write_weights(path, _random_tensors(config, seed, scale, dtype), num_shards)
    return path


def _config(kind: Kind, dtype: torch.dtype) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": kind == "qwen2",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if kind == "mistral":
        raw["sliding_window"] = None
    return raw


def _random_tensors(
    config: ModelConfig, seed: int, scale: float, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1.0 + 0.2 * torch.randn(size, generator=generator)).to(dtype)

    hidden, middle = config.hidden_size, config.intermediate_size
    tensors = {"model.embed_tokens.weight": normal(config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        sizes = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        for name, size in sizes.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = normal(size, hidden)
            if config.has_qkv_bias:
                tensors[f"{prefix}self_attn.{name}.bias"] = normal(size)
        tensors[f"{prefix}self_attn.o_proj.weight"] = normal(hidden, config.q_size)
        if config.has_o_bias:
            tensors[f"{prefix}self_attn.o_proj.bias"] = normal(hidden)
        if config.has_qk_norm:
            tensors[f"{prefix}self_attn.q_norm.weight"] = norm(config.head_dim)
            tensors[f"{prefix}self_attn.k_norm.weight"] = norm(config.head_dim)
        mlp = {"gate_proj": (middle, hidden), "up_proj": (middle, hidden)}
        for name, shape in (mlp | {"down_proj": (hidden, middle)}).items():
            tensors[f"{prefix}mlp.{name}.weight"] = normal(*shape)
            if config.has_mlp_bias:
                tensors[f"{prefix}mlp.{name}.bias"] = normal(shape[0])
        tensors[f"{prefix}input_layernorm.weight"] = norm(hidden)
        tensors[f"{prefix}post_attention_layernorm.weight"] = norm(hidden)
    tensors["model.norm.weight"] = norm(hidden)
    if not config.ties_embeddings:
        tensors["lm_head.weight"] = normal(config.vocab_size, hidden)
    return tensors


def _write_weights(path: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata=metadata)
        return
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, path / file_name, metadata=metadata)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(path: Path) -> None:
    specials = {BOS: BOS_ID, EOS: EOS_ID, PAD: PAD_ID}
    vocab = {character: byte for byte, character in enumerate(_byte_characters())} | specials
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, token_id in specials.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in characters]
    characters |= {byte: chr(256 + offset) for offset, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]
