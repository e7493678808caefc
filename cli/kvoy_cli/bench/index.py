"""`kvoy bench index`: the router's index at 10 million hashes, and its pick over 1,000 engines."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import msgspec

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.index_child import CHAIN, FLEETS, LONG_PROMPT_TOKENS, POLICIES, RouterCost
from kvoy_cli.bench.processes import child
from kvoy_cli.bench.report import Report, Table

ENTRIES = 10_000_000
ENGINES = 100
_SMOKE_ENTRIES = 20_000
_SMOKE_ENGINES = 5


async def run(context: BenchContext) -> Report:
    entries, engines = (_SMOKE_ENTRIES, _SMOKE_ENGINES) if context.is_smoke else (ENTRIES, ENGINES)
    context.say(f"filling an index with {entries:,} hashes")
    command = [sys.executable, "-m", "kvoy_cli.bench.index_child"]
    command += [str(entries), str(engines), str(context.repeats)]
    async with child("index", command, context.logs, stdout=subprocess.PIPE) as measuring:
        stdout = measuring.process.stdout
        assert stdout is not None
        answer = await asyncio.to_thread(stdout.read)
    try:
        return build_report(msgspec.json.decode(answer, type=RouterCost))
    except msgspec.DecodeError:
        raise measuring.failure("did not measure") from None


def build_report(measured: RouterCost) -> Report:
    cost, pick_us = measured.index, measured.pick_us
    largest = FLEETS[-1]
    events_per_s = min(cost.stored_per_s, cost.shared_per_s, cost.removed_per_s)
    return Report(
        name="index",
        setting=(
            f"{cost.entries:,} distinct hashes of {cost.engines} engines in chains of {CHAIN}; "
            "three further holders for a quarter of them; then picks over fleets that hold twelve "
            "of 150 prefixes each; CPU times of one process"
        ),
        tables=(
            Table(
                "Index",
                (
                    "bytes per hash",
                    "per further holder",
                    "stored/s",
                    "shared/s",
                    "removed/s",
                ),
                (
                    (
                        cost.bytes_per_entry,
                        cost.bytes_per_further_holder,
                        cost.stored_per_s,
                        cost.shared_per_s,
                        cost.removed_per_s,
                    ),
                ),
            ),
            Table(
                f"Longest prefix of {LONG_PROMPT_TOKENS:,} tokens, each engine with another; ms",
                ("again and again", "for the first time", "and all lengths told apart"),
                ((cost.match.warm_ms, cost.match.cold_ms, cost.match.cold_all_ms),),
            ),
            Table(
                "One request: load report, pick, first token, end; µs",
                ("policy", *(f"{size:,} engines" for size in FLEETS)),
                tuple(
                    (policy, *(pick_us[f"{policy} {size}"] for size in FLEETS))
                    for policy in POLICIES
                ),
            ),
        ),
        goals=(
            Goal("memory per distinct hash", cost.bytes_per_entry, "<=", 200.0, " bytes"),
            Goal("memory per further holder", cost.bytes_per_further_holder, "<=", 16.0, " bytes"),
            Goal("hash events, slowest kind", events_per_s, ">=", 200_000.0, "/s"),
            Goal(
                f"longest prefix of {LONG_PROMPT_TOKENS:,} tokens, {cost.engines} engines, cold",
                cost.match.cold_ms,
                "<=",
                1.0,
                " ms",
            ),
            Goal(
                f"one request over {largest:,} engines",
                max(pick_us[f"{policy} {largest}"] for policy in POLICIES),
                "<=",
                500.0,
                " µs",
            ),
        ),
        notes=(f"the self-audit takes {measured.audit_us:.2f} µs per request",),
        figures={
            "bytes_per_hash": cost.bytes_per_entry,
            "bytes_per_further_holder": cost.bytes_per_further_holder,
            "hash_events_per_s": events_per_s,
            "match_ms": cost.match.cold_ms,
            "match_warm_ms": cost.match.warm_ms,
            "match_all_ms": cost.match.cold_all_ms,
            "audit_us": measured.audit_us,
        },
    )
