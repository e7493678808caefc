"""What a peer is: what it is installed from, how it starts, and how one knows that it serves. Pure.

`catalogue` declares the peers, `environment` installs them, `routes` starts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """Where one peer is to run: its programs, its ports, its folder, and the engines behind it."""

    bin: Path
    """The folder of programs of the peer's own environment."""
    folder: Path
    """For files that it reads or writes."""
    port: int
    spare_ports: tuple[int, ...]
    """For whatever else it listens on."""
    engine_ports: tuple[int, ...]
    """On 127.0.0.1."""
    model: str
    tokenizer: Path | None
    """A folder with the model's tokenizer, for a peer that encodes."""

    @property
    def engine_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.engine_ports]


@dataclass(frozen=True, slots=True)
class Launch:
    """One process of a peer: command, environment, and files that are written before it starts."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Text by name inside `Place.folder`."""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    policy: str
    """How it is told to choose, in its own word."""
    package: str
    """The one of its requirements whose version stands for all."""
    launches: Callable[[Place], tuple[Launch, ...]]
    """The last one is measured, and answers on `Place.port`; those before it stand behind it."""
    num_spare_ports: int = 1
    start_s: float = 60.0
    """After so long without an answer it counts as one that cannot be started."""
    patience: int = 1
    """How many times as long it is measured, because it answers so few requests a second."""
    brings_engines: bool = False
    """Whether it routes to engines of its own kind alone: then nothing behind it is Kvoy's."""
