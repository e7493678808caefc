"""What a process holds and uses over time, and whether that grows. Reading is for Linux."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoy_cli.bench.stats import median, ratio


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    """Since the load began."""
    resident_bytes: int
    cpu_s: float
    """Used by the process so far."""


def resident_bytes(pid: int) -> int:
    """Physical memory of a process: exact, from the kernel's walk over its pages. Raises OSError
    where the process has ended or the system is not Linux."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/smaps_rollup has no Rss")


@dataclass(frozen=True, slots=True)
class Growth:
    """Resident memory after the warm-up."""

    num_samples: int
    first_bytes: float
    """Median of the first tenth of the samples; `last_bytes` of the last tenth."""
    last_bytes: float
    least_bytes: float
    greatest_bytes: float
    bytes_per_hour: float
    """Slope of the least-squares line."""

    @property
    def spread(self) -> float:
        """Greatest less least, as a share of the least."""
        return ratio(self.greatest_bytes - self.least_bytes, self.least_bytes)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Growth:
        """Raises ValueError for fewer than two samples."""
        if len(samples) < 2:
            raise ValueError(f"growth needs two samples, not {len(samples)}")
        sizes = [float(sample.resident_bytes) for sample in samples]
        tenth = max(1, len(sizes) // 10)
        return cls(
            num_samples=len(sizes),
            first_bytes=median(sizes[:tenth]),
            last_bytes=median(sizes[-tenth:]),
            least_bytes=min(sizes),
            greatest_bytes=max(sizes),
            bytes_per_hour=3600 * _slope([sample.at_s for sample in samples], sizes),
        )


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    variance = sum((x - mean_x) ** 2 for x in xs)
    return ratio(sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)), variance)
