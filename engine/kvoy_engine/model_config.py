"""What a model folder's `config.json` says, reduced to the numbers that our decoder needs.

Anything that would change the result and that the decoder does not do is refused here by name,
before a byte of weights is read. No torch: the command and the server ask this module too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures that the own decoder computes, by the name in `config.json`."""

_ROPE_TYPES = ("default", "linear", "llama3")


class ModelError(Exception):
    """The model cannot be loaded; the message says which file, field or tensor is why."""


class UnsupportedModel(ModelError):
    """The model asks for something that the decoder does not compute."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: its base and, for longer contexts, how frequencies are
    stretched."""

    theta: float
    kind: str = "default"
    """default, linear or llama3."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder-only model of the Llama family."""

    architecture: str
    family: str
    """llama, mistral, qwen2 or qwen3."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    ties_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    windows: tuple[int | None, ...]
    """Per layer: how many tokens back (itself included) a token sees; None sees all."""
    dtype: str | None
    """The checkpoint's own dtype (`bfloat16`), when it says."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the linear layers and embeddings (norms and biases are noise)."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.ties_embeddings else 2)
        return self.num_layers * layer + embeddings


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`).

    Raises ModelError when the file is missing or malformed, UnsupportedModel for what we do not
    compute.
    """
    raw = _read_json(model_dir / "config.json")
    generation_path = model_dir / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    return parse_model_config(raw, generation)


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The pure part of `load_model_config`."""
    architecture = _architecture(raw)
    family = ARCHITECTURES[architecture]
    _refuse_unsupported(raw)

    hidden_size = _positive_int(raw, "hidden_size")
    num_heads = _positive_int(raw, "num_attention_heads")
    num_kv_heads = _positive_int(raw, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    default_head_dim = 128 if family == "qwen3" else hidden_size // num_heads
    head_dim = _positive_int(raw, "head_dim", default=default_head_dim)
    if head_dim % 2:
        raise UnsupportedModel(f"config.json: head_dim {head_dim} is odd")
    num_layers = _positive_int(raw, "num_hidden_layers")
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=_positive_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, 10_000.0),
        max_position_embeddings=_positive_int(raw, "max_position_embeddings", default=2048),
        ties_embeddings=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
        has_o_bias=family in ("llama", "qwen3") and attention_bias,
        has_mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
        windows=_windows(raw, family, num_layers),
        dtype=_dtype(raw),
        eos_token_ids=_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        bos_token_id=next(iter(_token_ids(raw.get("bos_token_id"))), None),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; a model folder has a config.json") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected an object")
    return value


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    shown = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r}"
    raise UnsupportedModel(
        f"architecture {shown} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Fields whose other values would silently give another model."""
    if (act := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"config.json: hidden_act {act!r} is not supported (only silu)")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise UnsupportedModel(f"config.json: quantization_config ({method}) is not supported")
    if raw.get("rope_interleaved"):
        raise UnsupportedModel("config.json: rope_interleaved is not supported")
    rope = raw.get("rope_parameters") or {}
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"config.json: partial_rotary_factor {partial} is not supported")
    for name in ("num_experts", "num_local_experts"):
        if raw.get(name):
            raise UnsupportedModel(f"config.json: {name} (mixture of experts) is not supported")


def _rope(raw: Mapping[str, Any], default_theta: float) -> RopeConfig:
    """Both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    parameters: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise UnsupportedModel(
            f"config.json: rope_type {kind!r} is not supported; supported are "
            + ", ".join(_ROPE_TYPES)
        )
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", default_theta)))
    if kind == "default":
        return RopeConfig(theta=theta)
    try:
        if kind == "linear":
            return RopeConfig(theta=theta, kind=kind, factor=float(parameters["factor"]))
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position=int(parameters["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelError(f"config.json: rope_type {kind!r} needs {error.args[0]}") from error


def _windows(raw: Mapping[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    # Where a field is missing, these are the defaults that checkpoints were written against.
    window = raw.get("sliding_window", 4096 if family != "llama" else None)
    if family == "llama" or not window:
        return (None,) * num_layers
    if family == "mistral":
        return (int(window),) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    if layer_types := raw.get("layer_types"):
        if len(layer_types) != num_layers:
            raise ModelError("config.json: layer_types does not name every layer")
        return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
    first = int(raw.get("max_window_layers", 28))
    return tuple(int(window) if layer >= first else None for layer in range(num_layers))


def _dtype(raw: Mapping[str, Any]) -> str | None:
    name = raw.get("dtype", raw.get("torch_dtype"))
    return None if name is None else str(name).removeprefix("torch.")


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    raise ModelError(f"config.json: token id {value!r} is neither an integer nor a list of them")


def _positive_int(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {name} is {value!r}, expected a positive integer")
    return value
