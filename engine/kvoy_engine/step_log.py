"""A line of JSON for each step: when it began and ended, and what of its batch its time depends on.

For whoever fits a step law to a machine (`kvoy bench calibrate`); no engine needs it to serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvoy_engine.batch import Batch, Runner, RunnerInfo, RunnerOutput


class LoggedStep(msgspec.Struct, frozen=True, gc=False):
    """The terms of `timing_model.TimingModel`, as it counts them."""

    begin_s: float
    """On the system's monotonic clock, which is the same for all processes."""
    end_s: float
    rows: int
    prefill_tokens: int
    context_tokens: int

    @classmethod
    def of(cls, batch: Batch, begin_s: float, end_s: float) -> LoggedStep:
        prefill_tokens = context_tokens = 0
        for row in batch.rows:
            num_tokens = len(row.token_ids)
            context_tokens += row.start + num_tokens
            if num_tokens > 1 or not row.samples:
                prefill_tokens += num_tokens
        return cls(begin_s, end_s, len(batch.rows), prefill_tokens, context_tokens)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LoggedStep).decode_lines


class LoggedRunner:
    """A runner that writes down its steps. Satisfies `batch.Runner`."""

    def __init__(
        self, runner: Runner, path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Steps are added to the file. Raises OSError where it cannot be written."""
        self._runner = runner
        self._clock = clock
        self._file = path.open("ab", buffering=0)

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def run(self, batch: Batch) -> RunnerOutput:
        begin_s = self._clock()
        output = self._runner.run(batch)
        self._file.write(_encode(LoggedStep.of(batch, begin_s, self._clock())) + b"\n")
        return output

    def free_device_bytes(self) -> int:
        return self._runner.free_device_bytes()

    def close(self) -> None:
        self._file.close()
        self._runner.close()


def read_steps(path: Path) -> list[LoggedStep]:
    """All whole lines, in order. Raises msgspec.DecodeError for what is no such line."""
    data = path.read_bytes()
    return list(_decode(data[: data.rfind(b"\n") + 1]))
