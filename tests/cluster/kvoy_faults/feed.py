"""What happens in the namespaces of many operators, by one watch for each kind."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from kvoy_operator.kinds import Kind
from kvoy_operator.observed import Body
from kvoy_operator.record import Ref
from kvoy_operator_bench.client import Client

Listener = Callable[[Kind, str, Body], None]
"""Takes the kind, the event's type and the object."""


class Feed:
    def __init__(self, client: Client, kinds: Sequence[Kind]) -> None:
        self.kinds = kinds
        self._client = client
        self._listeners: dict[str, list[Listener]] = defaultdict(list)  # by namespace
        self._objects: dict[str, dict[Ref, tuple[Kind, Body]]] = defaultdict(dict)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for kind in self.kinds:
                see = partial(self._see, kind)
                group.create_task(self._client.watch(kind.path(None), kind.label_selector, see))

    def listen(self, namespace: str, listener: Listener) -> None:
        """Have `listener` told of all that happens in `namespace` from now on."""
        self._listeners[namespace].append(listener)

    def objects(self, namespace: str) -> dict[Ref, tuple[Kind, Body]]:
        """What there is now."""
        return dict(self._objects[namespace])

    def forget(self, namespace: str) -> None:
        self._listeners.pop(namespace, None)
        self._objects.pop(namespace, None)

    def _see(self, kind: Kind, event_type: str, body: Body) -> None:
        metadata = body["metadata"]
        namespace = metadata["namespace"]
        if namespace not in self._listeners:
            return  # another test's
        ref = Ref(kind.name, namespace, metadata["name"])
        if event_type == "DELETED":
            self._objects[namespace].pop(ref, None)
        else:
            self._objects[namespace][ref] = (kind, body)
        for listener in self._listeners[namespace]:
            listener(kind, event_type, body)
