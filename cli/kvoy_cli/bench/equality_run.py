"""Runs the equality cases: one by one on an engine without a cache, and mixed on two with one.

It speaks to the engines as a router does, with the envelope, because only a router is told token
ids and may resume a request elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvoy_cli.bench.client import Client, send_until
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.equality_cases import Case, Fate, Generation, margins_of
from kvoy_cli.bench.outcome import Outcome
from kvoy_cli.bench.processes import BenchError
from kvoy_cli.bench.request import Request, completion
from kvoy_cli.bench.stack import Engine, EngineSpec, engines
from kvoy_cli.bench.telemetry_view import read_load
from kvoy_contract import envelope as envelopes
from kvoy_contract.envelope import Envelope, ResumeState
from kvoy_contract.names import ENVELOPE_CONTENT_TYPE, SECRET_HEADER

_ROUTER_ID = "bench-equality"
_MAX_USERS = 32


@dataclass(frozen=True, slots=True)
class MixedRun:
    generations: list[Generation]
    cached_tokens: int
    prompt_tokens: int
    num_preemptions: int
    num_aborted: int
    num_resumed: int


@dataclass(slots=True)
class _Line:
    """A numbered line to one engine, as a router keeps."""

    client: Client
    secret: str
    numbers: int = 0
    cached_tokens: int = field(default=0)
    prompt_tokens: int = field(default=0)

    def wrap(self, request: Request, output_ids: Sequence[int] | None = None) -> Request:
        """The request in an envelope that asks for token ids and, with output, resumes."""
        self.numbers += 1
        envelope = Envelope(
            router_id=_ROUTER_ID,
            number=self.numbers,
            want_token_ids=True,
            resume=None if output_ids is None else ResumeState(output_ids=[list(output_ids)]),
        )
        return Request(
            request.path,
            envelopes.encode(envelope, request.body),
            ENVELOPE_CONTENT_TYPE,
            ((SECRET_HEADER, self.secret),),
        )

    def count(self, outcome: Outcome) -> None:
        self.cached_tokens += outcome.cached_tokens
        self.prompt_tokens += outcome.prompt_tokens


async def run_one_by_one(
    spec: EngineSpec, cases: Sequence[Case], context: BenchContext
) -> list[Generation]:
    """The reference: `spec` should have no cache; every request is alone on the engine."""
    async with engines([spec], context) as (engine,), Client(engine.url) as client:
        line = _Line(client, context.secret)
        generations: list[Generation] = []
        for case in cases:
            request = _request(case, context.served_name, logprobs=2)
            outcome = await client.send(line.wrap(request))
            _check(outcome)
            generations.append(
                Generation(tuple(outcome.token_ids), margins_of(outcome.top_logprobs))
            )
    if line.cached_tokens:
        raise BenchError("the reference engine used a cache")
    return generations


async def run_mixed(spec: EngineSpec, cases: Sequence[Case], context: BenchContext) -> MixedRun:
    """All at once on the first of two engines; what is cut to be resumed goes on on the second."""
    async with (
        engines([spec, spec], context) as (first, second),
        Client(first.url) as first_client,
        Client(second.url) as second_client,
    ):
        lines = (_Line(first_client, context.secret), _Line(second_client, context.secret))
        gate = asyncio.Semaphore(_MAX_USERS)

        async def one(case: Case) -> Generation:
            async with gate:
                return Generation(tuple(await _run_case(case, lines, context.served_name)))

        generations = await asyncio.gather(*map(one, cases))
        preemptions = [await _preemptions(engine, context) for engine in (first, second)]
    return MixedRun(
        generations=list(generations),
        cached_tokens=sum(line.cached_tokens for line in lines),
        prompt_tokens=sum(line.prompt_tokens for line in lines),
        num_preemptions=sum(preemptions),
        num_aborted=sum(case.fate is Fate.ABORTED for case in cases),
        num_resumed=sum(case.fate is Fate.RESUMED for case in cases),
    )


async def _run_case(case: Case, lines: tuple[_Line, _Line], model: str) -> list[int]:
    first, second = lines
    request = _request(case, model)
    outcome = Outcome(due_s=0.0)
    if case.fate is Fate.WHOLE:
        await first.client.send(first.wrap(request), outcome)
        _check(outcome)
        first.count(outcome)
        return outcome.token_ids
    await send_until(first.client, first.wrap(request), outcome, case.cut_after)
    if outcome.error is not None:
        _check(outcome)
    if case.fate is Fate.ABORTED or outcome.is_ok:
        return outcome.token_ids
    resumed = await second.client.send(second.wrap(request, outcome.token_ids))
    _check(resumed)
    second.count(resumed)
    return outcome.token_ids + resumed.token_ids


def _request(case: Case, model: str, **extra: Any) -> Request:
    return completion(model, case.prompt_ids, case.max_tokens, **case.sampling(), **extra)


async def _preemptions(engine: Engine, context: BenchContext) -> int:
    load = await read_load(engine.telemetry_port, context.secret)
    return int(load.num_preemptions)


def _check(outcome: Outcome) -> None:
    if not outcome.is_ok:
        raise BenchError(f"a request of the equality run failed: {outcome.error}")
