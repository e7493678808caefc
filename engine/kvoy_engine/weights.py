"""The tensors of a model folder, read lazily from one or many safetensors files.

Every tensor is taken once, by name. At the end `close` proves that nothing was missing and nothing
was left, so that a checkpoint with other parts than the decoder is refused instead of half loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvoy_engine.model_config import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
"""Buffers that some exporters store and every decoder computes."""


class WeightsError(ModelError):
    """A weights file or a tensor in it is missing, unexpected, or of the wrong shape."""


class WeightFiles:
    """The tensors of a folder by name; files stay mapped until `close`."""

    def __init__(self, model_dir: Path) -> None:
        self._dir = model_dir
        self._file_of = _tensor_files(model_dir)
        self._open: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._dropped: set[str] = set()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, in the dtype of the file, on the CPU.

        Raises WeightsError, naming the tensor, when it is missing or has another shape.
        """
        file_name = self._file_of.get(name)
        if file_name is None:
            raise WeightsError(f"{self._dir}: tensor {name} is missing")
        tensor: torch.Tensor = self._handle(file_name).get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"{self._dir}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}"
            )
        if not tensor.is_floating_point():
            raise WeightsError(f"{self._dir}: tensor {name} has dtype {tensor.dtype}")
        self._taken.add(name)
        return tensor

    def drop(self, name: str) -> None:
        """Do not complain about a tensor that a tied checkpoint may or may not repeat."""
        self._dropped.add(name)

    def check_all_taken(self) -> None:
        """Raises WeightsError naming the tensors that nobody took."""
        left = {
            name
            for name in self._file_of.keys() - self._taken - self._dropped
            if not name.endswith(_IGNORED_SUFFIXES)
        }
        if left:
            raise WeightsError(f"{self._dir}: unexpected tensors {_some(left)}")

    def _handle(self, file_name: str) -> Any:
        if file_name not in self._open:
            self._open[file_name] = _open(self._dir / file_name)
        return self._open[file_name]


def weight_file_names(model_dir: Path) -> list[str]:
    """Names of the safetensors files that make up the model, sorted.

    Raises WeightsError when there are none or an index names a file that is not there.
    """
    index = model_dir / _INDEX
    if index.is_file():
        return sorted(set(_read_index(index).values()))
    if (model_dir / _SINGLE).is_file():
        return [_SINGLE]
    raise WeightsError(f"{model_dir} has neither {_SINGLE} nor {_INDEX}")


def _tensor_files(model_dir: Path) -> dict[str, str]:
    index = model_dir / _INDEX
    names = weight_file_names(model_dir)
    if missing := [name for name in names if not (model_dir / name).is_file()]:
        raise WeightsError(f"{index} names {_some(missing)}, which is not there")
    found = {tensor: name for name in names for tensor in _tensor_names(model_dir / name)}
    if index.is_file() and (lost := _read_index(index).keys() - found.keys()):
        raise WeightsError(f"{index} names tensors that no file holds: {_some(lost)}")
    return found


def _tensor_names(path: Path) -> list[str]:
    return list(_open(path).keys())


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        return {str(tensor): str(name) for tensor, name in weight_map.items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{path} is not a safetensors index: {error}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} is not a readable safetensors file: {error}") from error


def _some(names: Iterable[str], limit: int = 5) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
