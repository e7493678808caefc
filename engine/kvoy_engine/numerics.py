"""The digest of everything but the weights that can change a logit's last bits."""

from __future__ import annotations

import platform
from hashlib import blake2b

import torch

from kvoy_engine.linear import WeightFormat, cpu_flags

_RELEVANT_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd")


def numerics_digest(
    weight_format: WeightFormat, kv_dtype: torch.dtype, device: torch.device, kernels: str
) -> str:
    """Two engines with the same digest and the same weights continue each other exactly."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        flags = cpu_flags()
        hardware = " ".join(
            [platform.machine(), *(flag for flag in _RELEVANT_FLAGS if flag in flags)]
        )
    parts = (torch.__version__, weight_format.name, str(kv_dtype), hardware, kernels, "tp1")
    return blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
