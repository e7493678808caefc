"""The benchmark's story: a cluster and an operator, then create, steady, add, delete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvoy_cli.bench.report import Report
from kvoy_cluster.fixtures import apply_kvoy_crds
from kvoy_operated import OperatorProcess
from kvoy_operated import Site as OperatorSite
from kvoy_operator_bench import stages
from kvoy_operator_bench.audit import AuditLog
from kvoy_operator_bench.client import connect
from kvoy_operator_bench.kubelet import WatchingKubelet
from kvoy_operator_bench.report import Outcome, report_of
from kvoy_operator_bench.scenario import scenario, service
from kvoy_operator_bench.server import BenchServer
from kvoy_operator_bench.settling import Settling

_STAGE_TIMEOUT_S = 120.0
_TIMEOUT_S_PER_SERVICE = 1.5
"""On a slow and busy machine; a stage that takes longer has gone wrong."""
_COMPLAINTS = (" warning ", " error ", " critical ")


@dataclass(frozen=True, slots=True)
class Options:
    num_services: int
    num_namespaces: int
    num_added: int
    """Services that are created one by one when the others are there."""
    steady_s: float
    log: Path | None = None
    """Where the operator's log is kept."""

    @property
    def timeout_s(self) -> float:
        """Of one stage."""
        return _STAGE_TIMEOUT_S + self.num_services * _TIMEOUT_S_PER_SERVICE


def run(options: Options, say: stages.Say) -> Report:
    """Starts everything, measures, and ends everything. Raises TimeoutError when a stage hangs."""
    started_s = time.monotonic()
    server = BenchServer()
    try:
        apply_kvoy_crds(server)
        namespaces = [server.create_namespace() for _ in range(options.num_namespaces)]
        site = OperatorSite(server, server.folder, is_cluster_wide=True)
        try:
            operator = site.start_operator()
            operator.wait_until_leading()
            outcome = asyncio.run(_measure(options, server, site, operator, namespaces, say))
        finally:
            site.close()
            if options.log is not None and site.log.exists():
                options.log.write_bytes(site.log.read_bytes())
    finally:
        server.stop()
    return report_of(outcome, time.monotonic() - started_s)


async def _measure(
    options: Options,
    server: BenchServer,
    operator_site: OperatorSite,
    operator: OperatorProcess,
    namespaces: Sequence[str],
    say: stages.Say,
) -> Outcome:
    start_rss_mb = psutil.Process(operator.pid).memory_info().rss / 1e6
    async with connect(server.kubeconfig) as client:
        settling = Settling(client, time.monotonic)
        audit = AuditLog(server.audit_log)
        site = stages.Site(client, operator, audit, settling, say)
        async with _alongside(WatchingKubelet(client).run(), settling.watch()):
            audit.read()
            say(f"creating {options.num_services} services")
            wanted = scenario(options.num_services, namespaces)
            creation = await stages.create(site, wanted, options.timeout_s)
            settle_times_s = settling.times_s()
            children = await stages.count_children(client)
            say(f"settled in {creation.wall_s:.0f} s; steady for {options.steady_s:.0f} s")
            steady = await stages.stay(site, options.steady_s)
            more = [
                service(options.num_services + number, namespaces[number % len(namespaces)])
                for number in range(options.num_added)
            ]
            added_s = await stages.add_one_by_one(site, more, options.timeout_s)
            say("restarting the operator")
            num_resources = len(wanted) + len(more)
            site, restart = await stages.restart(
                site, operator_site.start_operator, num_resources, options.timeout_s
            )
            say("deleting all")
            deletion = await stages.delete(site, namespaces, options.timeout_s)
    lines = operator.lines()
    return Outcome(
        num_services=options.num_services,
        num_namespaces=options.num_namespaces,
        operator_user=operator_site.user,
        start_rss_mb=start_rss_mb,
        creation=creation,
        settle_times_s=settle_times_s,
        children=children,
        steady=steady,
        added_s=added_s,
        restart=restart,
        deletion=deletion,
        num_log_lines=len(lines),
        num_complaints=sum(any(level in line for level in _COMPLAINTS) for line in lines),
    )


@asynccontextmanager
async def _alongside(*helpers: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Helpers run as long as the block; one that fails ends the block with its error."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(helper) for helper in helpers]
        yield
        for task in tasks:
            task.cancel()
