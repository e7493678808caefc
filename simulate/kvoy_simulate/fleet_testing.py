"""Small scenarios and scripted traffic for tests of the virtual fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvoy_engine.core_config import CoreConfig
from kvoy_engine.timing_model import TimingModel
from kvoy_simulate.fleet import Fleet
from kvoy_simulate.outcome import Outcome
from kvoy_simulate.runs import event_end_s
from kvoy_simulate.scenario import EngineGroup, Event, Scenario
from kvoy_simulate.traffic import PromptSpec, SimRequest

STEP = TimingModel(base_s=0.05, prefill_tokens_per_s=10_000.0, context_token_s=0.0)
CORE = CoreConfig(num_blocks=1000, max_model_len=2048, max_num_batched_tokens=512)


class Script:
    """These requests, and after each what `then` makes of it."""

    def __init__(
        self,
        requests: Iterable[SimRequest],
        then: Callable[[SimRequest, float], SimRequest | None] = lambda request, now_s: None,
    ) -> None:
        self._requests = list(requests)
        self._then = then

    def start(self) -> Sequence[SimRequest]:
        return self._requests

    def on_finish(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return self._then(request, now_s)


def ask(at_s: float, *, tokens: int = 160, output: int = 20, name: str = "") -> SimRequest:
    """A prompt of its own, or of this name."""
    session = name or f"asked-at-{at_s}"
    return SimRequest(at_s, PromptSpec(None, session, tokens), output, session)


def steady(
    per_s: float, until_s: float, *, tokens: int = 160, output: int = 20
) -> list[SimRequest]:
    count = int(per_s * until_s)
    return [ask(i / per_s, tokens=tokens, output=output) for i in range(count)]


def engines(count: int, name: str = "engine", speed: float = 1.0) -> EngineGroup:
    return EngineGroup(name=name, count=count, core=CORE, step=STEP, speed=speed)


def scene(
    requests: Iterable[SimRequest],
    *groups: EngineGroup,
    duration_s: float = 10.0,
    events: Sequence[Event] = (),
    routers: int = 1,
) -> Scenario:
    script = list(requests)
    return Scenario(
        engines=groups or (engines(2),),
        workload=lambda seed: Script(script),
        duration_s=duration_s,
        events=tuple(events),
        routers=routers,
    )


def play(scenario: Scenario, policy: str = "kv-aware", seed: int = 1) -> Outcome:
    """Run to the end, with every check on the way and at the end."""
    fleet = Fleet(scenario, policy, seed)

    def look() -> None:
        fleet.check_integrity()
        fleet.clock.after(0.5, look)

    look()
    fleet.run()
    fleet.clock.run(
        min(fleet.clock.now_s + 30.0, max(map(event_end_s, scenario.events), default=0))
    )
    fleet.settle(30.0)
    return fleet.outcome()


def column_bytes(outcome: Outcome) -> bytes:
    """All that a run has seen, to compare two runs."""
    columns = outcome.requests
    parts = [getattr(columns, name).tobytes() for name in columns.__dataclass_fields__]
    for series in outcome.engines:
        parts.append(series.name.encode())
        parts += [
            value.tobytes()
            for name in series.__dataclass_fields__
            if hasattr(value := getattr(series, name), "tobytes")
        ]
    parts.append(repr((outcome.names, dict(outcome.counters), outcome.ended_s)).encode())
    return b"\0".join(parts)
