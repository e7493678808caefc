"""Rotary position embedding: inverse frequencies and the tables of cosines and sines."""

from __future__ import annotations

import math

import torch

from kvoy_engine.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """(head_dim / 2,) radians per position, float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretch_low_frequencies(frequencies, rope)
    return frequencies


def rope_tables(
    rope: RopeConfig, head_dim: int, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (num_positions, head_dim / 2).

    Computed in float64 and rounded once, so that far positions are as exact as near ones.
    """
    positions = torch.arange(num_positions, dtype=torch.float64)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _stretch_low_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: wavelengths beyond the trained context are stretched by `factor`, short ones kept,
    and those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * frequencies + (1 - blend) * frequencies / rope.factor
