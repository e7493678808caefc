"""What a simulation saw: one column per fact about requests, one series per fact about engines.

Compact (`array`s, no object per request) and complete: whoever reads it computes latencies,
throughput, hit rates and load from it. Two runs of one scenario and seed have equal bytes.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field


class Status(enum.IntEnum):
    """How a request ended."""

    OK = 0
    REFUSED = 1
    """An engine or the router answered with an error before the first token."""
    BROKEN = 2
    """The stream broke after the first token, and nobody could go on with it."""
    CUT = 3
    """The client's router was killed."""
    UNFINISHED = 4
    """Still open when the simulation ended."""


NEVER = float("nan")
"""A time that did not come."""


@dataclass(slots=True)
class RequestColumns:
    """Row i of each column is the i-th request in order of arrival. Times in virtual seconds, NaN:
    never."""

    arrival_s: array[float] = field(default_factory=lambda: array("d"))
    """When the client sent it."""
    sent_s: array[float] = field(default_factory=lambda: array("d"))
    """When a router first sent it to an engine."""
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    """When the client had its first token."""
    end_s: array[float] = field(default_factory=lambda: array("d"))
    """When the client had its last token or error."""
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    cached_tokens: array[int] = field(default_factory=lambda: array("q"))
    """Prompt tokens that the engine of the first token found in its cache; 0 without one."""
    predicted_tokens: array[int] = field(default_factory=lambda: array("q"))
    """The same as the router saw it when it picked that engine."""
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    """Tokens that the client got."""
    engine: array[int] = field(default_factory=lambda: array("q"))
    """Position in `Outcome.engines` of the last one tried; -1: none."""
    router: array[int] = field(default_factory=lambda: array("q"))
    """Position of the replica, 0 ..; -1: none took it."""
    session: array[int] = field(default_factory=lambda: array("q"))
    """Position in `Outcome.names`."""
    group: array[int] = field(default_factory=lambda: array("q"))
    """Position in `Outcome.names`."""
    tenant: array[int] = field(default_factory=lambda: array("q"))
    """Position in `Outcome.names`."""
    priority: array[int] = field(default_factory=lambda: array("q"))
    retries: array[int] = field(default_factory=lambda: array("q"))
    """Further engines that it was sent to before its first token."""
    resumes: array[int] = field(default_factory=lambda: array("q"))
    """Further engines that went on with its stream."""
    status: array[int] = field(default_factory=lambda: array("b"))
    """A `Status`."""

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(slots=True)
class EngineSeries:
    """One process of an engine; a restart begins another one under the same name."""

    name: str
    group: str
    started_s: float
    total_blocks: int
    block_size: int
    times_s: array[float] = field(default_factory=lambda: array("d"))
    """Of the samples; the other columns have one value for each."""
    running: array[int] = field(default_factory=lambda: array("q"))
    waiting: array[int] = field(default_factory=lambda: array("q"))
    used_blocks: array[int] = field(default_factory=lambda: array("q"))
    cached_blocks: array[int] = field(default_factory=lambda: array("q"))
    """Unused, with work that can be used again."""
    queued_tokens: array[int] = field(default_factory=lambda: array("q"))
    """Prompt tokens accepted and not computed."""
    generated_tokens: array[int] = field(default_factory=lambda: array("q"))
    """Since its start."""
    ended_s: float = NEVER
    """When its process ended, if it did."""


@dataclass(frozen=True, slots=True)
class Outcome:
    policy: str
    seed: int
    duration_s: float
    warmup_s: float
    ended_s: float
    """Virtual time at which nothing was left to happen."""
    requests: RequestColumns
    engines: tuple[EngineSeries, ...]
    names: tuple[str, ...]
    """Sessions, groups and tenants, by position."""
    counters: Mapping[str, int]
    """Totals of the whole run: `steps`, `preemptions`, `picks`, `telemetry_events`, ..."""
