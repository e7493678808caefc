"""Tiny GGUF files for tests: random weights in llama.cpp's layout, and a small tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

from kvoy_engine.safetensors_writer import Array

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 2, 64, 4, 2, 16, 96
CONTEXT = 512
SPACE = "\u2581"
BYTE_LEVEL_WORDS = ["he", "ll", "hell", "hello", "\u0120w", "or", "\u0120wor", "ld", "\u0120world"]
BYTE_LEVEL_MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "\u0120 w",
    "o r",
    "\u0120w or",
    "l d",
    "\u0120wor ld",
]
PIECES = [SPACE, "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", f"{SPACE}hello"]


def write_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    tokenizer: str = "gpt2",
    pre: str = "smollm",
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    tied: bool = True,
    seed: int = 0,
) -> None:
    """Write a whole file. `tokenizer` is `gpt2` (bytes and a few merges) or `llama` (pieces)."""
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_key_length(HEAD_DIM)
    size = _add_byte_level(writer, pre) if tokenizer == "gpt2" else _add_pieces(writer)
    random = np.random.default_rng(seed)
    for name, shape in tensor_shapes(architecture, size, tied).items():
        values = random.normal(0.0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_shapes(architecture: str, vocab_size: int, tied: bool) -> dict[str, tuple[int, ...]]:
    """Name to shape, as numpy has it."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["output.weight"] = (vocab_size, HIDDEN)
    for layer in range(LAYERS):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if architecture == "qwen2":
            block["attn_q.bias"] = (HEADS * HEAD_DIM,)
            block["attn_k.bias"] = (KV_HEADS * HEAD_DIM,)
            block["attn_v.bias"] = (KV_HEADS * HEAD_DIM,)
        if architecture == "qwen3":
            block["attn_q_norm.weight"] = (HEAD_DIM,)
            block["attn_k_norm.weight"] = (HEAD_DIM,)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def permute_rows(values: Array, num_heads: int) -> Array:
    """llama.cpp's order of query and key rows: (head, half, pair) becomes (head, pair, half)."""
    half = values.shape[0] // num_heads // 2
    split = values.reshape(num_heads, 2, half, *values.shape[1:])
    permuted: Array = split.swapaxes(1, 2).reshape(values.shape)
    return permuted


def byte_alphabet() -> list[str]:
    """The printable letters that byte-level vocabularies use for the bytes 0 .. 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, spare = [], 256
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


def _add_byte_level(writer: GGUFWriter, pre: str) -> int:
    control = ["<|end|>", "<|im_start|>"]
    tokens = [*control, *byte_alphabet(), *BYTE_LEVEL_WORDS]
    tokens += [f"[PAD{index}]" for index in range(-len(tokens) % 32)]
    kinds = [3] * 2 + [5 if token.startswith("[PAD") else 1 for token in tokens[2:]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(BYTE_LEVEL_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|end|>{% endfor %}"
    )
    return len(tokens)


def _add_pieces(writer: GGUFWriter) -> int:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    tokens += [f"[PAD{index}]" for index in range(-len(tokens) % 32)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    kinds += [5] * (len(tokens) - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    return len(tokens)
