"""The step loop in a thread and in a process: messages in, outputs out, every failure noticed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from kvoy_contract.blocks import seed_hash
from kvoy_engine.build import ModelLoadFailed, build_core
from kvoy_engine.core_process import ProcessCore
from kvoy_engine.loop import CoreClient, Inbox, ThreadCore, describe_failure, run_core
from kvoy_engine.messages import (
    AbortRequest,
    AddRequest,
    BlockEvents,
    ChoiceStart,
    Command,
    FinishReason,
    Load,
    SamplingParams,
    StepOutput,
    TokensOut,
)
from kvoy_engine.testing_server import sim_config

DEADLINE_S = 30.0


class RecordingSink:
    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self.reason: str | None = None
        self._news = asyncio.Event()

    def on_step(self, output: StepOutput) -> None:
        self.outputs.append(output)
        self._news.set()

    def on_core_failed(self, reason: str) -> None:
        self.reason = reason
        self._news.set()

    @property
    def tokens(self) -> list[TokensOut]:
        return [out for output in self.outputs for out in output.tokens]

    async def until_finished(self, count: int = 1) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while sum(out.finish_reason is not None for out in self.tokens) < count:
                self._news.clear()
                await self._news.wait()

    async def until_failed(self) -> str:
        async with asyncio.timeout(DEADLINE_S):
            while self.reason is None:
                self._news.clear()
                await self._news.wait()
        return self.reason


class ScriptedCore:
    """Answers each command with nothing and each step as told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.has_work = False
        self.commands: list[Command] = []

    def handle(self, command: Command, now_s: float) -> list[TokensOut]:
        self.commands.append(command)
        self.has_work = True
        return []

    def report(self, now_s: float, tokens: list[TokensOut]) -> StepOutput:
        return StepOutput(now_s, tokens, BlockEvents(), Load(waiting=1))

    def step(self, now_s: float) -> StepOutput:
        if self.error is not None:
            raise self.error
        self.has_work = False
        return StepOutput(now_s, [], BlockEvents(), Load(num_steps=1))


def add_request(request_id: str = "1", max_tokens: int = 5) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=3)
    return AddRequest(
        request_id,
        list(range(40)),
        params,
        seed_hash("m"),
        [ChoiceStart(0)],
        router_id="r",
        number=4,
    )


def test_what_was_admitted_is_told_before_the_step() -> None:
    inbox, core, outputs = Inbox(), ScriptedCore(), []
    inbox.put(AbortRequest("x"))

    def emit(output: StepOutput) -> None:
        outputs.append(output)
        if len(outputs) == 2:
            inbox.close()

    run_core(core, inbox, emit, clock=lambda: 1.0)

    assert [output.load for output in outputs] == [Load(waiting=1), Load(num_steps=1)]
    assert core.commands == [AbortRequest("x")]


def test_a_closed_inbox_ends_the_loop_while_there_is_work() -> None:
    inbox, core = Inbox(), ScriptedCore()
    inbox.put(AbortRequest("x"))
    inbox.close()

    run_core(core, inbox, lambda output: None)

    assert core.commands == []


async def test_a_thread_reports_the_step_that_broke_it() -> None:
    sink, client = RecordingSink(), ThreadCore(ScriptedCore(RuntimeError("no memory\nat all")))
    client.start(sink)

    client.submit(AbortRequest("x"))
    reason = await sink.until_failed()
    await client.close()

    assert reason == "RuntimeError: no memory"


async def test_a_thread_frees_its_runner_when_it_ends() -> None:
    closed = threading.Event()
    client = ThreadCore(ScriptedCore(), closed.set)
    client.start(RecordingSink())

    await client.close()

    assert closed.is_set()


def test_a_failure_is_described_in_one_line() -> None:
    assert describe_failure(ValueError("a\nb")) == "ValueError: a"
    assert describe_failure(KeyError()) == "KeyError"


async def launch(kind: str) -> CoreClient:
    config = sim_config()
    if kind == "thread":
        built = build_core(config, lambda text: None)
        return ThreadCore(built.core, built.close)
    client, info = await ProcessCore.launch(config, lambda text: None)
    assert info.runner.block_size == 16
    return client


@pytest.mark.slow
async def test_thread_and_process_give_the_same_tokens() -> None:
    tokens = {}
    for kind in ("thread", "process"):
        client, sink = await launch(kind), RecordingSink()
        client.start(sink)
        client.submit(add_request())
        await sink.until_finished()
        await client.close()
        tokens[kind] = [out.token_ids for out in sink.tokens]
        assert sink.reason is None
        assert ("r", 4) in [pair for output in sink.outputs for pair in output.admitted]

    assert tokens["thread"] == tokens["process"]


@pytest.mark.slow
async def test_the_death_of_the_process_is_noticed() -> None:
    client, _ = await ProcessCore.launch(sim_config(sim_base_s=0.02), lambda text: None)
    sink = RecordingSink()
    client.start(sink)
    client.submit(add_request(max_tokens=10_000))

    os.kill(client.pid, signal.SIGKILL)
    reason = await sink.until_failed()
    client.submit(AbortRequest("1"))
    await client.close()

    assert "signal 9" in reason


@pytest.mark.slow
async def test_a_stopped_process_is_killed_at_the_end() -> None:
    client, _ = await ProcessCore.launch(sim_config(), lambda text: None)
    client.start(RecordingSink())
    os.kill(client.pid, signal.SIGSTOP)

    async with asyncio.timeout(DEADLINE_S):
        await client.close()

    with pytest.raises(ProcessLookupError):
        os.kill(client.pid, 0)


@pytest.mark.slow
async def test_a_process_that_cannot_load_says_why() -> None:
    config = sim_config(max_num_batched_tokens=8, max_num_seqs=16)

    with pytest.raises(ModelLoadFailed, match="max_num_batched_tokens"):
        await ProcessCore.launch(config, lambda text: None)


@pytest.mark.slow
async def test_aborts_reach_the_process() -> None:
    client, sink = await launch("process"), RecordingSink()
    client.start(sink)
    client.submit(add_request(max_tokens=10_000))

    client.submit(AbortRequest("1"))
    await sink.until_finished()
    await client.close()

    assert sink.tokens[-1].finish_reason is FinishReason.ABORT
