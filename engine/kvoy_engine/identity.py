"""The identity of a model's weights: what prefix blocks are keyed by. No torch.

Two folders with the same bytes have the same identity wherever they lie; a name never enters it.
"""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from pathlib import Path

_FILES = ("config.json",)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 64


def model_identity(model_dir: Path) -> str:
    """Hex digest (128 bits) over the configuration, every tensor's name, dtype, shape and place,
    and evenly spaced samples of the data.

    Reading all of a 16 GB checkpoint would take longer than loading it; 4 MiB from 64 places tells
    any two trainings apart. Raises FileNotFoundError when the folder has no safetensors weights.
    """
    hasher = blake2b(digest_size=16, person=b"kvoy-model-v1")
    for name in _FILES:
        _add(hasher, name.encode(), (model_dir / name).read_bytes())
    for path in _weight_paths(model_dir):
        _add(hasher, path.name.encode(), _fingerprint(path))
    return hasher.hexdigest()


def _weight_paths(model_dir: Path) -> list[Path]:
    index = model_dir / _INDEX
    if index.is_file():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [model_dir / name for name in sorted(names)]
    return [model_dir / _SINGLE]


def _fingerprint(path: Path) -> bytes:
    hasher = blake2b(digest_size=32)
    size = path.stat().st_size
    with path.open("rb") as file:
        (header_size,) = struct.unpack("<Q", file.read(8))
        hasher.update(struct.pack("<QQ", size, header_size))
        hasher.update(file.read(min(header_size, size)))
        begin = 8 + header_size
        step = max(_SAMPLE_BYTES, (size - begin) // _NUM_SAMPLES)
        for offset in range(begin, size, step):
            file.seek(offset)
            hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.digest()


def _add(hasher: blake2b, name: bytes, data: bytes) -> None:
    hasher.update(struct.pack("<QQ", len(name), len(data)))
    hasher.update(name)
    hasher.update(data)
