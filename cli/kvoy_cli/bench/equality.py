"""`kvoy bench equality`: batching, reuse, preemption and continuation change speed, not the
result.

The same requests run one by one without a cache, and all at once on two engines whose small pool
forces preemption, with shared prefixes, aborts, and resumes on the second engine. In float64 the
tokens must be the same; in float32 up to positions where the reference itself hesitated; in the
machine's own half precision the share of equal tokens is stated. The decoder is compared with
transformers alike.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.equality_cases import (
    Agreement,
    Case,
    CaseSizes,
    Fate,
    Generation,
    compare,
    make_cases,
)
from kvoy_cli.bench.equality_run import MixedRun, run_mixed, run_one_by_one
from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.machine import usable_cores
from kvoy_cli.bench.processes import BenchError
from kvoy_cli.bench.report import Cell, Report, Table
from kvoy_cli.bench.stack import EngineSpec, torch_engine
from kvoy_cli.bench.transformers_child import transformers

_HALF_GOAL = 0.995
_WRITE_TINY = (
    "import sys; from pathlib import Path; from kvoy_engine.testing import write_tiny_model; "
    "write_tiny_model(Path(sys.argv[1]), 'llama', seed=7)"
)


@dataclass(frozen=True, slots=True)
class Setup:
    """One model at one precision."""

    name: str
    folder: Path
    dtype: str
    flags: tuple[str, ...]
    sizes: CaseSizes
    num_blocks: int
    """Of the mixed engines: far less than the requests want at once."""
    is_exact: bool = False
    is_half: bool = False

    def engine(self, num_engines: int, *flags: str) -> EngineSpec:
        return torch_engine(self.folder, num_engines, "--dtype", self.dtype, *self.flags, *flags)


@dataclass(frozen=True, slots=True)
class Result:
    setup: Setup
    greedy: Agreement
    sampled: Agreement
    run: MixedRun


@dataclass(frozen=True, slots=True)
class OracleResult:
    name: str
    agreement: Agreement
    is_exact: bool


async def run(context: BenchContext) -> Report:
    tiny = await _write_tiny_model(context)
    setups = _setups(context, tiny)
    results = [await _run_setup(setup, context) for setup in setups]
    oracles = [await _against_transformers(setup, context) for setup in setups if not setup.is_half]
    return build_report(results, oracles)


def _setups(context: BenchContext, tiny: Path) -> list[Setup]:
    if context.is_smoke:
        sizes = CaseSizes(count=12, num_prefixes=3, max_prefix=40, max_tail=8, max_output=12)
        plain = ("--kernels", "torch")
        return [Setup("tiny, float64", tiny, "float64", plain, sizes, 24, is_exact=True)]
    few = CaseSizes(count=40, num_prefixes=5, max_prefix=120, max_tail=40, max_output=96)
    real = context.model_folder()
    name = real.name
    return [
        Setup(
            "tiny, float64", tiny, "float64", ("--kernels", "torch"), CaseSizes(), 40, is_exact=True
        ),
        Setup("tiny, float32", tiny, "float32", (), CaseSizes(), 40),
        Setup(f"{name}, float32", real, "float32", (), few, 32),
        Setup(f"{name}, auto", real, "auto", (), few, 32, is_half=True),
    ]


async def _write_tiny_model(context: BenchContext) -> Path:
    """A random model in its own process: this one never imports torch."""
    folder = context.logs / "tiny"
    command = [sys.executable, "-c", _WRITE_TINY, str(folder)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"the tiny model could not be written:\n{done.stderr[-2000:]}")
    return folder


async def _run_setup(setup: Setup, context: BenchContext) -> Result:
    cases = make_cases(setup.sizes, seed=len(setup.name))
    context.say(f"{setup.name}: {len(cases)} requests one by one, without a cache")
    alone = setup.engine(1, "--no-enable-prefix-caching")
    reference = await run_one_by_one(alone, cases, context)
    context.say(f"{setup.name}: the same at once on two engines of {setup.num_blocks} blocks")
    pool = ("--num-gpu-blocks-override", str(setup.num_blocks))
    mixed = await run_mixed(setup.engine(2, *pool), cases, context)
    return Result(
        setup,
        _compare_kind(cases, reference, mixed.generations, is_greedy=True),
        _compare_kind(cases, reference, mixed.generations, is_greedy=False),
        mixed,
    )


def _compare_kind(
    cases: Sequence[Case],
    reference: Sequence[Generation],
    mixed: Sequence[Generation],
    *,
    is_greedy: bool,
) -> Agreement:
    chosen = [i for i, case in enumerate(cases) if case.is_greedy is is_greedy]
    return compare(
        [cases[i] for i in chosen], [reference[i] for i in chosen], [mixed[i] for i in chosen]
    )


async def _against_transformers(setup: Setup, context: BenchContext) -> OracleResult:
    """Greedy outputs of the decoder and of transformers' `generate` at the same precision."""
    context.say(f"{setup.name}: against transformers")
    cases = [
        Case(case.prompt_ids, case.max_tokens, 0.0, 1.0, 0, Fate.WHOLE, 1)
        for case in make_cases(setup.sizes, seed=3)[: max(5, setup.sizes.count // 10)]
    ]
    ours = await run_one_by_one(setup.engine(1, "--no-enable-prefix-caching"), cases, context)
    dtype = setup.dtype
    theirs: list[Generation] = []
    async with transformers(setup.folder, dtype, usable_cores(), context.logs) as baseline:
        for case in cases:
            generated = await baseline.generate(case.prompt_ids, case.max_tokens)
            theirs.append(Generation(tuple(generated.token_ids), tuple(generated.margins)))
    return OracleResult(setup.name, compare(cases, theirs, ours), setup.is_exact)


def build_report(results: Sequence[Result], oracles: Sequence[OracleResult]) -> Report:
    goals = [goal for result in results for goal in _goals(result)]
    goals += [
        Goal(
            f"{oracle.name}: positions that differ from transformers"
            + ("" if oracle.is_exact else " where it was sure"),
            _differences(oracle.agreement, oracle.is_exact),
            "==",
            0,
        )
        for oracle in oracles
    ]
    return Report(
        name="equality",
        setting="requests with shared prefixes, random lengths, greedy and sampled, all at once on "
        "two engines with a small pool, 15 % aborted and 15 % resumed on the second engine; "
        "reference: one by one without a cache",
        tables=(_mixed_table(results), _oracle_table(oracles)),
        goals=tuple(goals),
        notes=(
            "outputs are compared up to their first difference; it is explained where the "
            "reference's two best logits were less than 1e-3 apart",
            "a sampled token may also differ where its random number falls on the edge between two "
            "tokens; exactness there is asked in float64, elsewhere the share is given",
        ),
        figures={f"agreement: {result.setup.name}": result.greedy.share for result in results},
    )


def _goals(result: Result) -> list[Goal]:
    setup, run = result.setup, result.run
    goals = [
        Goal(f"{setup.name}: preemptions that the small pool forced", run.num_preemptions, ">=", 1),
        Goal(f"{setup.name}: prompt tokens served from cache", run.cached_tokens, ">=", 1),
    ]
    if setup.is_half:
        name = f"{setup.name}: share of equal greedy tokens"
        return [*goals, Goal(name, result.greedy.share, ">=", _HALF_GOAL)]
    if setup.is_exact:
        different = result.greedy.num_different + result.sampled.num_different
        return [*goals, Goal(f"{setup.name}: positions that differ", different, "==", 0)]
    unsure = _differences(result.greedy, is_exact=False)
    name = f"{setup.name}: greedy positions that differ where the reference was sure"
    return [*goals, Goal(name, unsure, "==", 0)]


def _differences(agreement: Agreement, is_exact: bool) -> int:
    return agreement.num_different if is_exact else agreement.num_unexplained


def _mixed_table(results: Sequence[Result]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for result in results:
        run = result.run
        for kind, agreement in (("greedy", result.greedy), ("sampled", result.sampled)):
            rows.append(
                (
                    result.setup.name,
                    kind,
                    agreement.num_requests,
                    agreement.num_positions,
                    agreement.num_different,
                    agreement.num_unexplained,
                    100 * agreement.share,
                )
            )
        rows.append(
            (
                result.setup.name,
                f"all: {run.num_preemptions} preempted, {run.num_aborted} aborted, "
                f"{run.num_resumed} resumed, {run.cached_tokens:,} of {run.prompt_tokens:,} "
                "prompt tokens cached",
                len(run.generations),
                result.greedy.num_positions + result.sampled.num_positions,
                result.greedy.num_different + result.sampled.num_different,
                result.greedy.num_unexplained + result.sampled.num_unexplained,
                "",
            )
        )
    columns = ("setup", "requests", "number", "positions", "differ", "unexplained", "equal %")
    return Table("Mixed against one by one", columns, tuple(rows))


def _oracle_table(oracles: Sequence[OracleResult]) -> Table:
    rows = tuple(
        (o.name, a.num_requests, a.num_positions, a.num_different, a.num_unexplained)
        for o in oracles
        for a in (o.agreement,)
    )
    columns = ("setup", "prompts", "positions", "differ", "unexplained")
    return Table("Decoder against transformers (greedy)", columns, rows)
