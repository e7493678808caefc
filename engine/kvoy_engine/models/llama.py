"""The decoder of the Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3.

The families differ in biases, in norms of query and key heads, and in windows; the config says
which. Query, key and value projections are one product, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kvoy_engine.linear import Linear, PlainFormat, WeightFormat
from kvoy_engine.model_config import ModelConfig
from kvoy_engine.ops import AttentionLayer, Ops
from kvoy_engine.step_inputs import StepInputs
from kvoy_engine.weights import WeightFiles, WeightsError


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: torch.Tensor
    qkv: Linear
    attention: AttentionLayer
    o: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaDecoder:
    """Weights in their final format and the forward pass over them."""

    def __init__(
        self,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        final_norm: torch.Tensor,
        head: Linear,
        residual_dtype: torch.dtype,
        weights_bytes: int,
    ) -> None:
        self._embedding = embedding  # (vocab_size, hidden_size), in the format's weight dtype
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._residual_dtype = residual_dtype
        self.weights_bytes = weights_bytes

    def forward(self, inputs: StepInputs, ops: Ops, selected: torch.Tensor | None) -> torch.Tensor:
        """Compute all tokens of the step; return the normed hidden states of the selected ones.

        `selected` is (S,) int64 indices into the step's tokens, None for all. Returns (S,
        hidden_size). Writes the step's keys and values to the cache.
        """
        ops.begin(inputs)
        residual = F.embedding(inputs.token_ids, self._embedding).to(self._residual_dtype)
        delta: torch.Tensor | None = None
        for layer in self._layers:
            hidden = ops.add_rms_norm(residual, delta, layer.input_norm)
            attended = ops.attention(layer.qkv(hidden), layer.attention)
            hidden = ops.add_rms_norm(residual, layer.o(attended), layer.post_attention_norm)
            delta = layer.down(ops.silu_mul(layer.gate_up(hidden)))
        assert delta is not None
        if selected is not None:
            residual, delta = residual[selected], delta[selected]
        return ops.add_rms_norm(residual, delta, self._final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(S, hidden_size) normed states to (S, vocab_size) logits, float32 or float64."""
        return self._head(hidden).to(self._residual_dtype)


class _Progress(Protocol):
    def __call__(self, message: str, /) -> None: ...


def load_decoder(
    files: WeightFiles,
    config: ModelConfig,
    weight_format: WeightFormat,
    device: torch.device,
    progress: _Progress,
) -> LlamaDecoder:
    """Convert layer by layer, so that at most one layer exists twice.

    Raises WeightsError naming the tensor that is missing, unexpected, misshapen or out of range.
    """
    loader = _Loader(files, config, weight_format, device)
    embedding = loader.embedding()
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.layer(index))
        progress(f"weights: layer {index + 1} of {config.num_layers}")
    head = loader.head(embedding)
    final_norm = loader.norm("model.norm.weight")
    files.check_all_taken()
    return LlamaDecoder(
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=head,
        residual_dtype=loader.residual_dtype,
        weights_bytes=loader.weights_bytes,
    )


class _Loader:
    """Takes tensors by their checkpoint names and gives layers; counts the bytes that stay."""

    def __init__(
        self,
        files: WeightFiles,
        config: ModelConfig,
        weight_format: WeightFormat,
        device: torch.device,
    ) -> None:
        self._files = files
        self._config = config
        self._format = weight_format
        self._device = device
        is_double = weight_format.weight_dtype == torch.float64
        self.residual_dtype = torch.float64 if is_double else torch.float32
        self.weights_bytes = 0

    def embedding(self) -> torch.Tensor:
        config = self._config
        tensor = self._files.take(
            "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        )
        self.weights_bytes += tensor.numel() * self._format.weight_dtype.itemsize
        return tensor.to(self._device, self._format.weight_dtype, copy=True)

    def head(self, embedding: torch.Tensor) -> Linear:
        name = "lm_head.weight"
        if self._config.ties_embeddings:
            self._files.drop(name)
            source = embedding
        else:
            source = self._files.take(name, tuple(embedding.shape))
        head = self._linear(name, lambda: source, None)
        if not (self._config.ties_embeddings and isinstance(self._format, PlainFormat)):
            self.weights_bytes += head.weight_bytes
        return head

    def layer(self, index: int) -> DecoderLayer:
        config = self._config
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q_norm = k_norm = None
        if config.has_qk_norm:
            q_norm = self.norm(attention + "q_norm.weight", config.head_dim)
            k_norm = self.norm(attention + "k_norm.weight", config.head_dim)
        sizes = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        mlp_sizes = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        hidden = config.hidden_size
        layer = DecoderLayer(
            input_norm=self.norm(prefix + "input_layernorm.weight"),
            qkv=self._fused(attention, sizes, hidden, config.has_qkv_bias),
            attention=AttentionLayer(index, config.windows[index], q_norm, k_norm),
            o=self._fused(attention, {"o_proj": hidden}, config.q_size, config.has_o_bias),
            post_attention_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            gate_up=self._fused(mlp, mlp_sizes, hidden, config.has_mlp_bias),
            down=self._fused(
                mlp, {"down_proj": hidden}, config.intermediate_size, config.has_mlp_bias
            ),
        )
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            self.weights_bytes += linear.weight_bytes
        return layer

    def norm(self, name: str, size: int | None = None) -> torch.Tensor:
        tensor = self._files.take(name, (size or self._config.hidden_size,))
        return tensor.to(self._device, self.residual_dtype, copy=True)

    def _fused(
        self, prefix: str, out_sizes: dict[str, int], in_size: int, has_bias: bool
    ) -> Linear:
        """One linear layer of several projections, one under another."""
        bias = None
        if has_bias:
            bias = torch.cat(
                [self._files.take(f"{prefix}{n}.bias", (size,)) for n, size in out_sizes.items()]
            )

        def weight() -> torch.Tensor:
            return torch.cat(
                [
                    self._files.take(f"{prefix}{n}.weight", (size, in_size))
                    for n, size in out_sizes.items()
                ]
            )

        return self._linear(prefix + "/".join(out_sizes), weight, bias)

    def _linear(
        self, name: str, weight: Callable[[], torch.Tensor], bias: torch.Tensor | None
    ) -> Linear:
        try:
            return self._format.linear(weight(), bias)
        except OverflowError as error:
            raise WeightsError(
                f"tensor {name}: {error}; use --dtype bfloat16 or float32"
            ) from error
