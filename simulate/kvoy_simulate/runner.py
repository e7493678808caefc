"""A runner that answers at once and says how long a real one would have taken."""

from __future__ import annotations

from kvoy_engine.batch import Batch, RowOutput, RunnerInfo, RunnerOutput
from kvoy_engine.core_config import CoreConfig
from kvoy_engine.timing_model import TimingModel

_TOKEN = RowOutput(token_id=0)
_NO_TOKEN = RowOutput()


class VirtualRunner:
    """Satisfies `batch.Runner`. Times are those of the timing model that paces simulated engines;
    tokens are all alike, since nobody reads them."""

    def __init__(self, model: TimingModel, core: CoreConfig, speed: float = 1.0) -> None:
        self._model = model
        self._core = core
        self.speed = speed
        """How many times as fast as the model its steps are; may change."""

    @property
    def info(self) -> RunnerInfo:
        return RunnerInfo(
            num_blocks=self._core.num_blocks,
            block_size=self._core.block_size,
            block_bytes=0,
            vocab_size=1,
            max_model_len=self._core.max_model_len,
            numerics="virtual",
        )

    def run(self, batch: Batch) -> RunnerOutput:
        duration_s = self._model.duration_s(batch) / self.speed
        return RunnerOutput(
            [_TOKEN if row.samples else _NO_TOKEN for row in batch.rows], duration_s
        )

    def free_device_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is held."""
