"""What the benchmark does to the cluster, one stage after the other; each returns what it saw."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvoy_operated import OperatorProcess
from kvoy_operated.operator_process import sum_of
from kvoy_operator.kinds import CUSTOM, LLM_ROUTER, LLM_SERVICE, SECRET, WATCHED, Kind
from kvoy_operator_bench.audit import AuditLog, Call
from kvoy_operator_bench.client import Client
from kvoy_operator_bench.reconciles import Reconciles
from kvoy_operator_bench.scenario import Wanted
from kvoy_operator_bench.settling import Settling
from kvoy_operator_bench.usage import Usage, measured

_NUM_CREATORS = 16
_LOOK_S = 1.0
_QUIET_S = 5.0
"""Without a write for so long, the controllers have finished too."""
_QUIET_TIMEOUT_S = 300.0
_PROGRESS_S = 30.0
_SCRAPE_INTERVAL_S = 30.0
"""As often as a Prometheus would: rendering the metrics is part of the operator's work."""
_SELECTOR = WATCHED[-1].label_selector
_CHILDREN = (*(kind for kind in WATCHED if kind not in CUSTOM), CUSTOM[-1], SECRET)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stretch of time cost."""

    wall_s: float
    usage: Usage
    calls: Counter[Call]
    reconciles: Reconciles


@dataclass(frozen=True, slots=True)
class Site:
    """What all stages work with."""

    client: Client
    operator: OperatorProcess
    audit: AuditLog
    settling: Settling
    say: Say


async def create(site: Site, wanted: Sequence[Wanted], timeout_s: float) -> Stage:
    """Create everything as fast as the server takes it, and wait until all is settled."""
    before, started_s = await scrape(site), time.monotonic()
    async with measured(site.operator.pid) as usage:
        progress = asyncio.create_task(_tell_progress(site, len(wanted)))
        try:
            await _create_all(site, wanted)
            await site.settling.wait_until_all(timeout_s)
            wall_s = time.monotonic() - started_s
        finally:
            progress.cancel()
        await _wait_until_quiet(site)
    return Stage(wall_s, usage, site.audit.read(), await scrape(site) - before)


async def add_one_by_one(site: Site, wanted: Sequence[Wanted], timeout_s: float) -> list[float]:
    """Create each when the one before has settled; the seconds that each took."""
    times_s = []
    for each in wanted:
        started_s = time.monotonic()
        await _create_all(site, [each])
        await site.settling.wait_until_all(timeout_s)
        times_s.append(time.monotonic() - started_s)
    await _wait_until_quiet(site)
    site.audit.read()
    return times_s


async def stay(site: Site, duration_s: float) -> Stage:
    """Let nothing happen; metrics are scraped as they would be."""
    before, started_s = await scrape(site), time.monotonic()
    async with measured(site.operator.pid) as usage:
        while (left_s := started_s + duration_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, _SCRAPE_INTERVAL_S))
            after = await scrape(site)
    return Stage(usage.wall_s, usage, site.audit.read(), after - before)


async def restart(
    site: Site, start: Callable[[], OperatorProcess], num_resources: int, timeout_s: float
) -> tuple[Site, Stage]:
    """End the operator and start another, until it has looked at everything; the site with it."""
    await asyncio.to_thread(site.operator.terminate)
    site, started_s = replace(site, operator=start()), time.monotonic()
    async with measured(site.operator.pid) as usage:
        async with asyncio.timeout(timeout_s):
            await _wait_until_caught_up(site, num_resources)
        wall_s = time.monotonic() - started_s
        await _wait_until_quiet(site)
    return site, Stage(wall_s, usage, site.audit.read(), await scrape(site))


async def delete(site: Site, namespaces: Sequence[str], timeout_s: float) -> Stage:
    """Delete all services and routers, and wait until garbage collection has taken the rest."""
    before, started_s = await scrape(site), time.monotonic()
    async with measured(site.operator.pid) as usage, asyncio.timeout(timeout_s):
        for namespace in namespaces:
            for kind in (LLM_SERVICE, LLM_ROUTER):
                await site.client.request("DELETE", kind.path(namespace))
        for kind in (LLM_SERVICE, LLM_ROUTER, *_CHILDREN):
            await _wait_until_none(site.client, kind)
    wall_s = time.monotonic() - started_s
    return Stage(wall_s, usage, site.audit.read(), await scrape(site) - before)


async def count_children(client: Client) -> dict[str, int]:
    """How many objects of each kind the operator, and the controllers for it, have made."""
    counts = {}
    for kind in _CHILDREN:
        found = await client.request("GET", f"{kind.path(None)}?labelSelector={_SELECTOR}")
        counts[kind.plural] = len(found["items"])
    return counts


async def scrape(site: Site) -> Reconciles:
    return Reconciles.scraped(await asyncio.to_thread(site.operator.get, "/metrics"))


async def _wait_until_caught_up(site: Site, num_resources: int) -> None:
    while True:
        with contextlib.suppress(OSError):  # does not listen yet
            metrics = await asyncio.to_thread(site.operator.get, "/metrics")
            is_idle = sum_of(metrics, "kvoy_operator_queue_depth") == 0
            if is_idle and Reconciles.scraped(metrics).count >= num_resources:
                return
        await asyncio.sleep(_LOOK_S)


async def _create_all(site: Site, wanted: Sequence[Wanted]) -> None:
    left = iter(wanted)

    async def create_some() -> None:
        for each in left:
            site.settling.created(each)
            await site.client.request("POST", each.kind.path(each.namespace), each.body)

    async with asyncio.TaskGroup() as group:
        for _ in range(_NUM_CREATORS):
            group.create_task(create_some())


async def _tell_progress(site: Site, total: int) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        site.say(f"{len(site.settling.times_s())} of {total} settled")


async def _wait_until_quiet(site: Site) -> None:
    """Return when nobody has written anything for a while."""
    async with asyncio.timeout(_QUIET_TIMEOUT_S):
        size, since_s = site.audit.num_bytes, time.monotonic()
        while time.monotonic() - since_s < _QUIET_S:
            await asyncio.sleep(_LOOK_S)
            if site.audit.num_bytes != size:
                size, since_s = site.audit.num_bytes, time.monotonic()


async def _wait_until_none(client: Client, kind: Kind) -> None:
    selector = "" if kind in (LLM_SERVICE, LLM_ROUTER) else f"&labelSelector={_SELECTOR}"
    while True:
        found = await client.request("GET", f"{kind.path(None)}?limit=1{selector}")
        if not found["items"]:
            return
        await asyncio.sleep(_LOOK_S)
