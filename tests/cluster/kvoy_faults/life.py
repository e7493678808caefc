"""The life of one resource under operators that are killed: created, rolled out, edited back in the
middle of a rollout, deleted in the middle of another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoy_cluster.api import APPLY_PATCH
from kvoy_contract.names import (
    COMPONENT_LABEL,
    ENGINE_COMPONENT,
    POOL_LABEL,
    REVISION_LABEL,
)
from kvoy_faults.core import Core, end
from kvoy_faults.doomed_api import Killed
from kvoy_faults.end_state import differences, end_state, in_words
from kvoy_faults.feed import Feed
from kvoy_faults.kubelet import Kubelet
from kvoy_operated.kubelet import is_ready
from kvoy_operator.api import Api
from kvoy_operator.kinds import (
    DEPLOYMENT,
    LEADER_WORKER_SET,
    LLM_ROUTER,
    LLM_SERVICE,
    POD,
    SECRET,
    Kind,
)
from kvoy_operator.observed import Body
from kvoy_operator.options import RenderOptions
from kvoy_operator.record import Ref
from kvoy_operator_bench.client import Client

_TIMEOUT_S = 90.0
_LOOK_S = 0.05
_QUIET_S = 1.5
_GROUP_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
_WORKER_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
_NAME = "qwen"
NUM_REPLICAS = 2

CREATE, ROLL_OUT, EDIT_BACK, DELETE = "create", "roll out", "edit back", "delete"
PHASES = (CREATE, ROLL_OUT, EDIT_BACK, DELETE)


@dataclass(frozen=True, slots=True)
class Shape:
    """What is created."""

    name: str
    spec: Mapping[str, Any]
    has_shared_router: bool = False


@dataclass(frozen=True, slots=True)
class Death:
    """At which write of each phase the operator is killed, counted from 1; None: never."""

    at: int | None = None
    is_applied: bool = False


@dataclass(slots=True)
class Told:
    """What came of one life, by phase."""

    num_writes: dict[str, int] = field(default_factory=dict)
    """Of the first operator of the phase."""
    num_kills: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    ends: dict[str, Any] = field(default_factory=dict)
    num_objects: dict[Ref, int] = field(default_factory=dict)
    """How many objects of each kind and name there have been."""


@dataclass(frozen=True, slots=True)
class World:
    """What all lives share."""

    api: Api
    client: Client
    feed: Feed
    kubelet: Kubelet
    options: RenderOptions


class Life:
    def __init__(self, world: World, namespace: str, shape: Shape, death: Death) -> None:
        self._world = world
        self._namespace = namespace
        self._shape = shape
        self._death = death
        self.told = Told()
        self._phase = CREATE
        self._uids: dict[Ref, set[str]] = defaultdict(set)
        self._ready: dict[str, set[str]] = defaultdict(set)  # names of pods, by pool
        self._least_ready: dict[str, int] = {}
        world.feed.listen(namespace, world.kubelet.see)
        world.feed.listen(namespace, self._see)
        self._core = self._new_core()
        self._generations: dict[Kind, int] = {}
        """Of what was applied last."""
        self._on_kill: Callable[[], Any] | None = None

    async def live(self, expected: Told | None) -> Told:
        """To the end. Raises AssertionError for an end that differs from the `expected` one, and
        for capacity that was missing."""
        operators = asyncio.create_task(self._operate())
        try:
            async with asyncio.timeout(_TIMEOUT_S * len(PHASES)):
                await self._create(expected)
                await self._roll_out(expected)
                await self._edit_back(expected)
                await self._delete()
        finally:
            await end(operators)
            self._world.feed.forget(self._namespace)
        return self.told

    async def _create(self, expected: Told | None) -> None:
        self._begin(CREATE)
        if self._shape.has_shared_router:
            await self._apply(LLM_ROUTER, "all", {})
        await self._apply_service("a")
        await self._reach_end(expected)

    async def _roll_out(self, expected: Told | None) -> None:
        self._begin(ROLL_OUT)
        self._watch_capacity()
        await self._apply_service("b")
        await self._reach_end(expected)
        self._check_capacity()

    async def _edit_back(self, expected: Told | None) -> None:
        """With one replica of the third revision ready and the other one stuck."""
        self._begin("way to " + EDIT_BACK, Death())
        self._watch_capacity()
        self._world.kubelet.hold(self._namespace, self._one_of(self._current_revision()))
        await self._apply_service("c")
        await self._until(self._is_midway, "the middle of a rollout")
        self._begin(EDIT_BACK)
        await self._apply_service("b")
        await self._reach_end(expected)
        self._world.kubelet.release(self._namespace)
        self._check_capacity()
        await self._check_calm()

    async def _delete(self) -> None:
        """At the chosen write of another rollout; without one at the first."""
        # What is deleted while an operator has yet to hear of it may be made again, and goes again.
        self.told.num_objects = {
            Ref(ref.kind, "", ref.name): len(uids) for ref, uids in self._uids.items()
        }
        self._begin(DELETE, Death(self._death.at or 1, self._death.is_applied))
        deleted = asyncio.Event()

        async def delete() -> None:
            paths = [LLM_SERVICE.path(self._namespace, _NAME)]
            if self._shape.has_shared_router:
                paths.append(LLM_ROUTER.path(self._namespace, "all"))
            for path in paths:
                await self._world.client.request("DELETE", path)
            deleted.set()

        self._on_kill = delete
        await self._apply_service("d")
        with contextlib.suppress(TimeoutError):
            # A rollout of fewer writes than that ends, and is deleted at its end.
            async with asyncio.timeout(5.0):
                await deleted.wait()
        if self._on_kill is not None:
            self._on_kill = None
            await delete()
        await self._until(self._is_all_gone, "all gone")
        self._end()

    async def _operate(self) -> None:
        """One operator after the other."""
        while True:
            try:
                await self._core.run()
            except* Killed:
                self.told.num_kills[self._phase] += 1
                if self._on_kill is not None:
                    delete, self._on_kill = self._on_kill, None
                    await delete()
                self._end()
                self._core = self._new_core()

    def _new_core(self) -> Core:
        world = self._world
        return Core(world.api, world.feed, self._namespace, world.options)

    def _begin(self, phase: str, death: Death | None = None) -> None:
        self._phase = phase
        death = death or self._death
        self._core.api.arm(death.at, is_applied=death.is_applied)

    def _end(self) -> None:
        self.told.num_writes.setdefault(self._phase, len(self._core.api.writes))

    async def _reach_end(self, expected: Told | None) -> None:
        """Wait until it is settled, and as it is without faults."""
        await self._until(self._is_settled, "settled")
        if expected is not None:
            wanted = expected.ends[self._phase]

            async def is_there() -> bool:
                return not differences(wanted, await self._state())

            with contextlib.suppress(TimeoutError):
                await self._until(is_there, "the end")
            here = f"{self._shape.name} {self._phase} {self._death}"
            assert not (found := differences(wanted, await self._state())), f"{here}: {found}"
        else:
            await self._until_quiet()
        self.told.ends[self._phase] = await self._state()
        self._end()

    async def _until_quiet(self) -> None:
        """Until the controllers have caught up too."""
        before: Any = None
        while (state := await self._state()) != before:
            before = state
            await asyncio.sleep(_QUIET_S)

    async def _check_calm(self) -> None:
        """What is settled is left alone, by the next operator too where this one dies just now."""
        core = self._core
        core.api.arm(None, is_applied=False)
        while not await core.look_again():
            await asyncio.sleep(0.01)  # until there is another one
            core = self._core
        # Events of what was done before may still be on their way.
        writes = [write for write in core.api.writes if "/events" not in write]
        assert not writes, writes

    async def _state(self) -> dict[str, Any]:
        objects = self._world.feed.objects(self._namespace).values()
        return end_state(objects, await self._secrets())

    async def _secrets(self) -> list[Body]:
        found = await self._world.client.request("GET", SECRET.path(self._namespace))
        secrets: list[Body] = found["items"]
        return secrets

    def _is_settled(self) -> bool:
        bodies = dict(self._objects(LLM_SERVICE, LLM_ROUTER))
        return bodies.keys() == self._generations.keys() and all(
            _is_settled(body, self._generations[kind]) for kind, body in bodies.items()
        )

    async def _is_all_gone(self) -> bool:
        # Secrets are not watched: each look at them is a call.
        return not self._world.feed.objects(self._namespace) and not await self._secrets()

    def _is_midway(self) -> bool:
        """Whether each pool has one old replica, and two new ones of which one is ready."""
        counts = [body["spec"]["replicas"] for _, body in self._workloads()]
        ready = [
            (body.get("status") or {}).get("readyReplicas", 0) for _, body in self._workloads()
        ]
        pools = {body["metadata"]["labels"][POOL_LABEL] for _, body in self._workloads()}
        return sorted(counts) == [1] * len(pools) + [2] * len(pools) and set(ready) == {1}

    def _describe(self) -> str:
        """All that may tell why something has not come."""
        told = {
            "applied": {kind.name: number for kind, number in self._generations.items()},
            "operator": self._core.describe(),
            "kills": dict(self.told.num_kills),
            "objects": [
                f"{kind.name} {in_words(body)}"
                for kind, body in self._objects(
                    LLM_SERVICE, LLM_ROUTER, DEPLOYMENT, LEADER_WORKER_SET, POD
                )
            ],
        }
        return json.dumps(told, indent=1)

    def _workloads(self) -> list[tuple[Kind, Body]]:
        return [
            (kind, body)
            for kind, body in self._objects(DEPLOYMENT, LEADER_WORKER_SET)
            if body["metadata"]["labels"].get(COMPONENT_LABEL) == ENGINE_COMPONENT
        ]

    def _objects(self, *kinds: Kind) -> list[tuple[Kind, Body]]:
        found = self._world.feed.objects(self._namespace).values()
        return [(kind, body) for kind, body in found if kind in kinds]

    def _current_revision(self) -> str:
        ((_, service),) = self._objects(LLM_SERVICE)
        revision: str = service["status"]["revision"]["current"]
        return revision

    def _one_of(self, revision: str) -> Callable[[Body], bool]:
        """Of other revisions than this one only the first replica of each pool becomes ready."""
        first: set[str] = set()

        def may_become_ready(pod: Body) -> bool:
            labels = pod["metadata"]["labels"]
            if labels.get(COMPONENT_LABEL) != ENGINE_COMPONENT:
                return True
            if labels[REVISION_LABEL] == revision:
                return True
            if _GROUP_LABEL in labels:
                return bool(labels[_GROUP_LABEL] == "0")
            if labels[POOL_LABEL] in first:
                return False
            first.add(labels[POOL_LABEL])
            return True

        return may_become_ready

    def _see(self, kind: Kind, event_type: str, body: Body) -> None:
        metadata = body["metadata"]
        if kind == POD:
            self._count(event_type, body)
        else:
            ref = Ref(kind.name, self._namespace, metadata["name"])
            self._uids[ref].add(metadata["uid"])
        self._core.see(kind, event_type, body)

    def _count(self, event_type: str, pod: Body) -> None:
        """Serving replicas: for a group its leader's readiness."""
        metadata = pod["metadata"]
        pool = metadata["labels"].get(POOL_LABEL)
        if pool is None or metadata["labels"].get(_WORKER_LABEL, "0") != "0":
            return
        is_serving = (
            event_type != "DELETED" and "deletionTimestamp" not in metadata and is_ready(pod)
        )
        (self._ready[pool].add if is_serving else self._ready[pool].discard)(metadata["name"])
        num_ready = len(self._ready[pool])
        self._least_ready[pool] = min(num_ready, self._least_ready.get(pool, num_ready))

    def _watch_capacity(self) -> None:
        self._least_ready = {pool: len(names) for pool, names in self._ready.items()}

    def _check_capacity(self) -> None:
        """There was room for one more: nothing may have been missing."""
        what = f"{self._shape.name} {self._phase} {self._death}"
        assert min(self._least_ready.values()) >= NUM_REPLICAS, what

    async def _apply_service(self, version: str) -> None:
        spec = {
            "model": {"uri": "hf://Qwen/Qwen3-0.6B"},
            "replicas": NUM_REPLICAS,
            "router": {"replicas": 1},
            **self._shape.spec,
        }
        env = [{"name": "VERSION", "value": version}]
        spec["engine"] = {**spec.get("engine", {}), "env": env}
        if self._shape.has_shared_router:
            spec["router"] = {"ref": "all"}
        await self._apply(LLM_SERVICE, _NAME, spec)

    async def _apply(self, kind: Kind, name: str, spec: Mapping[str, Any]) -> None:
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name},
            "spec": spec,
        }
        path = f"{kind.path(self._namespace, name)}?fieldManager=user&force=true"
        made = await self._world.client.request("PATCH", path, body, APPLY_PATCH)
        self._generations[kind] = made["metadata"]["generation"]

    async def _until(self, check: Callable[[], Any], what: str) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            seen = check()
            if asyncio.iscoroutine(seen):
                seen = await seen
            if seen:
                return
            if time.monotonic() > deadline_s:
                here = f"{self._shape.name} {self._phase} {self._death}"
                raise TimeoutError(f"{here}: {what}: not in time; {self._describe()}")
            await asyncio.sleep(_LOOK_S)


def _is_settled(custom: Body, generation: int) -> bool:
    status = custom.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    return (
        status.get("observedGeneration") == generation
        and conditions.get("Ready") == "True"
        and conditions.get("Progressing", "False") == "False"
    )
