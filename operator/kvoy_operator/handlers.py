"""kopf's part: one low-level handler over all watched kinds, which only passes objects on.

`kopf.on.event` writes nothing: no annotation, no finalizer, no event. kopf runs in a thread with a
loop of its own, because it considers every task of its loop its own and may end when a kind
disappears; what it sees is handed over as records.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import kopf
from lightkube.config.kubeconfig import SingleConfig

from kvoy_operator.credentials import kopf_session
from kvoy_operator.kinds import Kind
from kvoy_operator.record import Record, Ref, record_of
from kvoy_operator.watch_health import INACTIVITY_TIMEOUT_S, SERVER_TIMEOUT_S, WatchHealth

log = logging.getLogger(__name__)

_CHUNK_SIZE = 500
"""Objects of one page of a list: bounds the memory that a restart takes."""
_MAX_WORKERS = 64
"""kopf has one task per object that changes; a list of thousands needs no thousands at once."""
_CONNECT_TIMEOUT_S = 10.0
_LIST_TIMEOUT_S = 60.0
_LOGIN_RETRY_S = 5.0
_STOP_TIMEOUT_S = 10.0
_CANCEL_TIMEOUT_S = 2.0

OnPut = Callable[[Record], object]
OnGone = Callable[[Ref, str], object]


class Watch:
    """Watches some kinds in one, several or all namespaces until `stop`.

    `on_put` and `on_gone` are called in the loop that called `start`, and so is `on_end`, with what
    ended it, when kopf gives up by itself.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        namespaces: Sequence[str],
        config: SingleConfig,
        health: WatchHealth,
        on_put: OnPut,
        on_gone: OnGone,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._kinds = kinds
        self._namespaces = namespaces
        self._config = config
        self._health = health
        self._on_put = on_put
        self._on_gone = on_gone
        self._on_end = on_end
        self._is_stopping = False
        self._stop: asyncio.Event | None = None
        self._kopf_loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for kind, namespace in self._places():
            self._health.expect(kind, namespace)
        self._thread.start()

    async def stop(self) -> None:
        """End kopf; a watch that does not end in time is left to the end of the process."""
        self._is_stopping = True
        if self._kopf_loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended already
                self._kopf_loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)
        for kind, namespace in self._places():
            self._health.dismiss(kind, namespace)

    def _places(self) -> list[tuple[Kind, str | None]]:
        namespaces: Sequence[str | None] = self._namespaces or (None,)
        return [(kind, namespace) for kind in self._kinds for namespace in namespaces]

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._watch())
        except BaseException as ended:
            error = ended
        if not self._is_stopping:
            self._hand_over(self._on_end, error)

    async def _watch(self) -> None:
        """Until `stop`, or until one of kopf's tasks ends, which raises its error.

        kopf's own `operator` then waits for all that it has spawned, and a stream that it cannot
        reach holds it for ever, deaf: here everything is cancelled, and awaited for a moment.
        """
        self._kopf_loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        tasks = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=_settings(self._kinds),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=list(self._namespaces),
            stop_flag=self._stop,
        )
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # What breaks from here on has been broken off: kopf's generators say so when they close.
        self._kopf_loop.set_exception_handler(_note_end)
        await _cancel(tasks)
        # A task of kopf's may take a first cancellation for another one's.
        for _ in range(2):
            await _cancel(
                task for task in asyncio.all_tasks() if task is not asyncio.current_task()
            )
        for task in ended:
            task.result()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.AiohttpSession:
            return await kopf_session(self._config, self._health)

        kopf.on.login(registry=registry, backoff=_LOGIN_RETRY_S)(login)
        for kind in self._kinds:
            kopf.on.event(*_selector(kind), registry=registry)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def handle(event: Any, **_: Any) -> None:
            self._health.saw_event(kind, event["object"]["metadata"]["namespace"])
            self._pass_on(kind, event["type"], event["object"])

        handle.__name__ = kind.plural
        return handle

    def _pass_on(self, kind: Kind, event_type: str | None, body: dict[str, Any]) -> None:
        try:
            record = record_of(kind, body)
        except (KeyError, TypeError, ValueError):
            # kopf would drop the event with a line of its own; the object's name is worth more.
            name = (body.get("metadata") or {}).get("name")
            log.exception("object not understood", extra={"kind": kind.name, "name": name})
            return
        if event_type == "DELETED":
            self._hand_over(self._on_gone, record.ref, record.uid)
        else:
            self._hand_over(self._on_put, record)

    def _hand_over(self, callback: Callable[..., object], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the operator's loop is closed: it ends
            self._loop.call_soon_threadsafe(callback, *arguments)


def _note_end(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    log.debug("a watch was broken off", extra={"said": context.get("message")})


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel, and wait a moment for the end."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=_CANCEL_TIMEOUT_S)


def _selector(kind: Kind) -> tuple[str, ...]:
    if kind.group:
        return (kind.group, kind.version, kind.plural)
    return (kind.version, kind.plural)


def _settings(kinds: Sequence[Kind]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # Else kopf lists and watches CRDs and namespaces, which takes a ClusterRole.
    settings.scanning.disabled = True
    settings.watching.server_timeout = SERVER_TIMEOUT_S
    settings.watching.inactivity_timeout = INACTIVITY_TIMEOUT_S
    settings.watching.connect_timeout = _CONNECT_TIMEOUT_S
    settings.watching.chunk_size = _CHUNK_SIZE
    settings.networking.connect_timeout = _CONNECT_TIMEOUT_S
    settings.networking.request_timeout = _LIST_TIMEOUT_S
    settings.networking.error_backoffs = EndlessBackoff()
    settings.queueing.worker_limit = _MAX_WORKERS
    # A worker waits that long for more of its object before it ends.
    settings.queueing.idle_timeout = 0.01
    settings.persistence.diffbase_storage = _NoDiffBase()
    for kind in kinds:
        if kind.label_selector:
            key: Any = _selector(kind)
            settings.watching.label_selectors[key] = kind.label_selector
    return settings


class EndlessBackoff:
    """Delays of kopf's retries, in seconds: an API server that is away for an hour is waited for.

    kopf ends with an error after the last delay of a finite list.
    """

    def __iter__(self) -> Iterator[float]:
        delay_s = 1.0
        while True:
            yield delay_s * random.uniform(0.5, 1.0)
            delay_s = min(delay_s * 2, 20.0)


class _NoDiffBase(kopf.DiffBaseStorage):
    """No handler of ours asks what changed: nothing is remembered and nothing computed for it."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None
