"""Makes a scenario's events happen to a fleet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, assert_never

from kvoy_simulate.link import TelemetryLink
from kvoy_simulate.router import VirtualRouter
from kvoy_simulate.scenario import (
    EngineDies,
    EngineHangs,
    EngineSlows,
    Event,
    RouterRestarts,
    ScaleDown,
    ScaleUp,
    TelemetryLost,
)

if TYPE_CHECKING:
    from kvoy_simulate.fleet import Fleet


class Mishaps:
    """An event whose engine is not there at its time does nothing."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lost: list[TelemetryLost] = []
        """Those that last."""
        self._num_engines = {group.name: group.count for group in fleet.scenario.engines}
        """Engines of each group so far; names are not used again."""
        self._slowed: dict[str, int] = {}
        """Engine → how many slowdowns it has had; the latest one counts."""

    def schedule(self, events: Iterable[Event]) -> None:
        for event in events:
            self._fleet.clock.at(event.at_s, self._happen, event)

    def on_link(self, router: VirtualRouter, address: str, link: TelemetryLink) -> None:
        """A new link meets what lasts."""
        if any(_concerns(event, router, address) for event in self._lost):
            link.cut()

    def _happen(self, event: Event) -> None:
        fleet, clock = self._fleet, self._fleet.clock
        match event:
            case EngineDies():
                self._kill(event)
            case EngineHangs():
                if engine := fleet.engines.get(event.engine):
                    engine.hang(clock.now_s + event.for_s)
            case EngineSlows():
                self._slow(event)
            case TelemetryLost():
                self._lost.append(event)
                for link in self._links_of(event):
                    link.cut()
                clock.after(event.for_s, self._mend, event)
            case RouterRestarts():
                if event.is_killed:
                    fleet.replicas.kill(event.router, event.down_s)
                else:
                    fleet.replicas.roll(event.router, event.grace_s)
            case ScaleUp():
                clock.after(event.load_s, self._scale_up, event)
            case ScaleDown():
                self._scale_down(event)
            case _:
                assert_never(event)

    def _kill(self, event: EngineDies) -> None:
        fleet = self._fleet
        engine = fleet.engines.get(event.engine)
        if engine is None:
            return
        fleet.end_engine(event.engine)
        if event.restart_after_s is not None and not engine.is_draining:
            fleet.clock.after(
                event.restart_after_s, fleet.restart_engine, event.engine, engine.group
            )

    def _slow(self, event: EngineSlows) -> None:
        engine = self._fleet.engines.get(event.engine)
        if engine is None:
            return
        number = self._slowed[event.engine] = self._slowed.get(event.engine, 0) + 1
        engine.runner.speed = engine.group.speed / event.factor

        def recover() -> None:
            if self._slowed[event.engine] == number:
                engine.runner.speed = engine.group.speed

        if event.for_s < float("inf"):
            self._fleet.clock.after(event.for_s, recover)

    def _links_of(self, event: TelemetryLost) -> list[TelemetryLink]:
        return [
            link
            for router in self._fleet.replicas.live
            for address, link in router.links.items()
            if _concerns(event, router, address)
        ]

    def _mend(self, event: TelemetryLost) -> None:
        self._lost.remove(event)
        for router in self._fleet.replicas.live:
            for address, link in router.links.items():
                if not any(_concerns(other, router, address) for other in self._lost):
                    link.mend()

    def _scale_up(self, event: ScaleUp) -> None:
        groups = {group.name: group for group in self._fleet.scenario.engines}
        for _ in range(event.count):
            number = self._num_engines[event.group]
            self._num_engines[event.group] += 1
            self._fleet.start_engine(f"{event.group}-{number}", groups[event.group])

    def _scale_down(self, event: ScaleDown) -> None:
        live = [
            name
            for name, engine in self._fleet.engines.items()
            if engine.group.name == event.group and not engine.is_draining
        ]
        for name in live[::-1][: event.count]:
            self._fleet.drain_engine(name, event.grace_s)


def _concerns(event: TelemetryLost, router: VirtualRouter, address: str) -> bool:
    is_engine = not event.engines or address in event.engines
    return is_engine and (not event.routers or router.position in event.routers)
