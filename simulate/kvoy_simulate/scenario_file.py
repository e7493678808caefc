"""Scenario files: YAML in, a `Scenario` for the fleet out.

A file says what a `Scenario` says, with a description of the workload in place of its maker. See
docs/simulate.md. Unknown keys and values out of range are errors that name the place in the file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import yaml

from kvoy_router.flow_ticket import FlowLimits
from kvoy_router.pool import PoolConfig
from kvoy_simulate.mirror import convert
from kvoy_simulate.scenario import EngineGroup, Event, Scenario, Ways
from kvoy_simulate.sessions import Sessions
from kvoy_simulate.trace import Trace
from kvoy_simulate.traffic import Workload
from kvoy_simulate.workloads import (
    Bursts,
    Description,
    Independent,
    Mixed,
    SharedPrefix,
)

Part = SharedPrefix | Independent | Bursts | Sessions | Trace


class Mix(Description, frozen=True, tag_field="kind", tag="mix"):
    """Several workloads at once; each has its own tenant and priority."""

    parts: dict[str, Part]
    """By name, which is also its tenant if it says none."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts must name at least one workload")

    def build(self, name: str, seed: int) -> Workload:
        parts = [
            (part if part.tenant else msgspec.structs.replace(part, tenant=key)).build(
                f"{name}/{key}", seed
            )
            for key, part in self.parts.items()
        ]
        return Mixed(parts)

    def at_rate(self, rate: float) -> Mix:
        raise ValueError("workload kind mix has no single rate to set")


class ScenarioError(ValueError):
    """A scenario file that cannot be used; the message names the file, the place and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioFile:
    """The keys of a file, beside which those of `Scenario` keep their meaning and defaults."""

    summary: str
    """One line for people."""
    engines: tuple[EngineGroup, ...]
    workload: Part | Mix
    duration_s: float
    warmup_s: float = 0.0
    drain_s: float = 600.0
    routers: int = 1
    ways: Ways = field(default_factory=Ways)
    pool: PoolConfig = field(default_factory=PoolConfig)
    events: tuple[Event, ...] = ()
    max_retries: int = 2
    max_resumes: int = 2
    hang_timeout_s: float = 3.0
    retry_share: float = 0.2
    retry_burst: int = 1024
    flow: FlowLimits | None = field(default_factory=FlowLimits)
    """On, as in a router; None: requests go to engines at once."""
    sample_s: float = 0.5

    def __post_init__(self) -> None:
        if self.warmup_s >= self.duration_s:
            raise ValueError(
                f"warmup_s must be below duration_s {self.duration_s:g}, not {self.warmup_s:g}"
            )
        self.scenario()

    def scenario(self) -> Scenario:
        """Raises ValueError when a value cannot work."""
        workload = self.workload
        values = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("summary", "workload")
        }
        return Scenario(workload=lambda seed: workload.build("w", seed), **values)

    def at_rate(self, rate: float) -> ScenarioFile:
        """The same with the workload's rate replaced (a closed loop's: its users)."""
        return dataclasses.replace(self, workload=self.workload.at_rate(rate))


def parse_scenario(text: str, name: str) -> ScenarioFile:
    """`name` is what errors call the file. Raises ScenarioError."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScenarioError(f"{name}: not YAML: {error}") from error
    if not isinstance(value, dict):
        raise ScenarioError(f"{name}: a scenario is a mapping, not {type(value).__name__}")
    try:
        return convert(value, ScenarioFile)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{name}: {error}") from error


def read_scenario(path: Path) -> ScenarioFile:
    """Raises ScenarioError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror or error}") from error
    return parse_scenario(text, str(path))


def shipped_scenarios() -> dict[str, Path]:
    """Those that come with the package, by name."""
    folder = Path(__file__).parent / "scenarios"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_scenario(name: str) -> ScenarioFile:
    """A file's path, or the name of a shipped one. Raises ScenarioError."""
    shipped = shipped_scenarios()
    if name in shipped:
        return read_scenario(shipped[name])
    if not Path(name).exists() and "/" not in name and not name.endswith((".yaml", ".yml")):
        raise ScenarioError(f"no scenario {name!r}; shipped are {', '.join(shipped)}")
    return read_scenario(Path(name))
