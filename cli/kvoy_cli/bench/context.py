"""What every benchmark is given: the model, how often to repeat, where logs go, and how to talk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvoy_cli.bench.processes import BenchError


@dataclass(frozen=True, slots=True)
class BenchContext:
    model: str
    """Reference of a real model, as `kvoy serve` takes it."""
    repeats: int
    logs: Path
    """A folder for the output of child processes."""
    say: Callable[[str], None]
    """Progress for people, on standard error."""
    secret: str
    """Shared by the engines and routers of this run."""
    is_smoke: bool = False
    """Tiny sizes that prove the benchmark runs; its figures mean nothing."""
    served_name: str = "bench"

    def model_folder(self) -> Path:
        """The resolved model, fetched or converted first where it must be."""
        from kvoy_engine import model_store
        from kvoy_engine.model_errors import ModelSourceError

        try:
            return model_store.resolve(self.model, self.say)
        except ModelSourceError as error:
            raise BenchError(f"model {self.model}: {error}") from error
