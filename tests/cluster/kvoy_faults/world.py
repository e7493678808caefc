"""Many lives at the same time over one API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvoy_cluster.api_server import ApiServer
from kvoy_faults.core import end
from kvoy_faults.feed import Feed
from kvoy_faults.kubelet import Kubelet
from kvoy_faults.life import Death, Life, Shape, Told, World
from kvoy_operator.api import Api, load_kubeconfig
from kvoy_operator.kinds import LEADER_WORKER_SET, WATCHED
from kvoy_operator.render_testing import make_options
from kvoy_operator_bench.client import connect


@asynccontextmanager
async def make_world(server: ApiServer, *, has_lws: bool) -> AsyncIterator[World]:
    api = Api(load_kubeconfig(str(server.kubeconfig)))
    kinds = (*WATCHED, *((LEADER_WORKER_SET,) if has_lws else ()))
    async with connect(server.kubeconfig) as client:
        feed, kubelet = Feed(client, kinds), Kubelet(client)
        tasks = [asyncio.create_task(feed.run()), asyncio.create_task(kubelet.run())]
        try:
            yield World(api, client, feed, kubelet, make_options(router_role_kind="ClusterRole"))
        finally:
            for task in tasks:
                await end(task)
            await api.close()


async def live_with_every_death(
    world: World,
    server: ApiServer,
    shape: Shape,
    num_at_once: int,
    *,
    on_both_sides: bool,
    every: int = 1,
) -> tuple[Told, list[Told]]:
    """One life without faults, and others with a death at each write of its longest phase, or at
    one of `every` so many.

    The death comes before the server has carried the write out, or after; in turn, or, with
    `on_both_sides`, each in a life of its own.
    """

    async def live(death: Death, expected: Told | None) -> Told:
        namespace = await asyncio.to_thread(server.create_namespace)
        return await Life(world, namespace, shape, death).live(expected)

    calm = await live(Death(), None)
    limit = asyncio.Semaphore(num_at_once)

    async def live_in_turn(death: Death) -> Told:
        async with limit:
            return await live(death, calm)

    deaths = [
        Death(number, is_applied)
        for number in range(1, max(calm.num_writes.values()) + 1, every)
        for is_applied in (False, True)
        if on_both_sides or is_applied is bool(number % 2)
    ]
    async with asyncio.TaskGroup() as group:
        lives = [group.create_task(live_in_turn(death)) for death in deaths]
    return calm, [each.result() for each in lives]
