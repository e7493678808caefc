"""Sees when services and routers have settled: their status says so of their present generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvoy_operator.kinds import LLM_ROUTER, LLM_SERVICE
from kvoy_operator_bench.client import Body, Client
from kvoy_operator_bench.scenario import Wanted

Name = tuple[str, str, str]
"""Kind, namespace, name."""


class Settling:
    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._created_s: dict[Name, float] = {}
        self._settled_s: dict[Name, float] = {}
        self._change = asyncio.Event()

    async def watch(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for kind in (LLM_SERVICE, LLM_ROUTER):
                group.create_task(self._client.watch(kind.path(None), "", self._see))

    def created(self, wanted: Wanted) -> None:
        """Its creation is about to be asked for."""
        self._created_s[_name_of(wanted.body)] = self._clock()

    async def wait_until_all(self, timeout_s: float) -> None:
        """Return once everything that was created is settled. Raises TimeoutError naming some."""
        try:
            async with asyncio.timeout(timeout_s):
                while missing := self._created_s.keys() - self._settled_s.keys():
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError as error:
            some = ", ".join("/".join(name) for name in sorted(missing)[:5])
            raise TimeoutError(
                f"{len(missing)} resources not settled within {timeout_s:.0f} s: {some}, ..."
            ) from error

    def times_s(self) -> list[float]:
        """From the creation of each settled resource until it was first seen so."""
        return [seen_s - self._created_s[name] for name, seen_s in self._settled_s.items()]

    def _see(self, event_type: str, body: Body) -> None:
        name = _name_of(body)
        if event_type != "DELETED" and name not in self._settled_s and is_settled(body):
            self._settled_s[name] = self._clock()
            self._change.set()


def is_settled(body: Body) -> bool:
    """Whether a service or router is ready and nothing goes on."""
    states = {
        condition["type"]: condition["status"]
        for condition in (body.get("status") or {}).get("conditions") or ()
        if condition.get("observedGeneration") == body["metadata"]["generation"]
    }
    return states.get("Ready") == "True" and states.get("Progressing", "False") == "False"


def _name_of(body: Body) -> Name:
    metadata = body["metadata"]
    return body["kind"], metadata["namespace"], metadata["name"]
