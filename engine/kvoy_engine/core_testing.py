"""For tests of the core: a runner that proves block tables by really reading through them, an
oracle, and a driver that checks every invariant after every step.

Its "KV" of a token is the token's id and position. The next token is a hash of the whole context as
read back through the row's block table, so a wrong, stale or overwritten block changes what comes
out, and `naive_output` says what must come out without any blocks.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kvoy_engine.batch import Batch, Row, RowOutput, RunnerInfo, RunnerOutput
from kvoy_engine.core import CoreConfig, EngineCore
from kvoy_engine.messages import (
    AbortRequest,
    AddRequest,
    ChoiceStart,
    Command,
    ErrorKind,
    FinishReason,
    ResetPrefixCache,
    SamplingParams,
    StepOutput,
    TokenLogprob,
    TokensOut,
)

VOCAB_SIZE = 50


class PagedHashRunner:
    """Satisfies `batch.Runner`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int = 4096,
        failing: Iterable[tuple[str, int]] = (),
    ) -> None:
        """A row of a request breaks when (request id, number of its output tokens) is in
        `failing`."""
        self.info = RunnerInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            block_bytes=0,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            numerics="hash",
        )
        self.num_computed_tokens = 0
        self._failing = frozenset(failing)
        self._slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)

    def run(self, batch: Batch) -> RunnerOutput:
        self._check_that_writes_are_private(batch)
        for row in batch.rows:
            self.num_computed_tokens += row.num_tokens
            for offset, token_id in enumerate(row.token_ids):
                position = row.start + offset
                self._slots[self._slot(row, position)] = (position, token_id)
        return RunnerOutput([self._output(row) for row in batch.rows], duration_s=0.01)

    def free_device_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is held."""

    def _slot(self, row: Row, position: int) -> int:
        size = self.info.block_size
        return row.block_table[position // size] * size + position % size

    def _check_that_writes_are_private(self, batch: Batch) -> None:
        size = self.info.block_size
        users: dict[int, int] = {}
        for row in batch.rows:
            for block in row.block_table:
                users[block] = users.get(block, 0) + 1
        for row in batch.rows:
            end = row.start + row.num_tokens
            for block in row.block_table[row.start // size : -(-end // size)]:
                assert users[block] == 1, f"row {row.seq_id} writes to a shared block"

    def _output(self, row: Row) -> RowOutput:
        if (row.request_id, len(row.output_ids)) in self._failing:
            for offset in range(row.num_tokens):
                self._slots[self._slot(row, row.start + offset)] = (-1, -1)
            return RowOutput(error="logits are not finite")
        context = self._read(row)
        prompt_logprobs: list[TokenLogprob] = []
        if row.wants_prompt_logprobs:
            end = min(len(context), len(row.prompt_ids) - 1)
            prompt_logprobs = [
                hash_logprob(context[: i + 1], row.prompt_ids[i + 1]) for i in range(row.start, end)
            ]
        if not row.samples:
            return RowOutput(prompt_logprobs=prompt_logprobs)
        token_id = next_token(context, row.params, row.choice, len(row.output_ids))
        logprob = hash_logprob(context, token_id) if row.params.logprobs is not None else None
        return RowOutput(token_id, logprob, prompt_logprobs)

    def _read(self, row: Row) -> list[int]:
        context = []
        for position in range(row.start + row.num_tokens):
            slot = self._slots[self._slot(row, position)]
            assert slot is not None, f"row {row.seq_id} reads position {position} before its write"
            assert slot[0] == position, f"row {row.seq_id} reads another position's slot"
            context.append(slot[1])
        return context


@dataclass(slots=True)
class ChoiceResult:
    """What the core has said of one choice so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    error_kind: ErrorKind | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_time_s: float = 0.0

    def take(self, out: TokensOut) -> None:
        assert self.finish_reason is None, f"{out} after the end"
        self.token_ids += out.token_ids
        self.logprobs += out.logprobs or []
        if out.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = out.prompt_logprobs
        self.finish_reason = out.finish_reason
        self.error_kind = out.error_kind
        self.num_cached_tokens = out.num_cached_tokens
        self.num_preemptions = out.num_preemptions
        self.queue_time_s = out.queue_time_s


class CoreDriver:
    """Sends commands and steps on a virtual clock; `results` has what came back for each choice."""

    def __init__(self, config: CoreConfig, failing: Iterable[tuple[str, int]] = ()) -> None:
        self.runner = PagedHashRunner(
            config.num_blocks, config.block_size, config.max_model_len, failing
        )
        self.core = EngineCore(self.runner, config)
        self.now_s = 0.0
        self.results: dict[tuple[str, int], ChoiceResult] = {}
        self.steps: list[StepOutput] = []
        self.known_hashes: set[bytes] = set()
        """What a listener to the block events holds."""

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        choices: Sequence[ChoiceStart] = (ChoiceStart(0),),
        seed_hash: bytes = b"seed" * 4,
        priority: int = 0,
        router_id: str = "",
        number: int = 0,
    ) -> None:
        for start in choices:
            self.results[request_id, start.index] = ChoiceResult(list(start.output_ids))
        self._handle(
            AddRequest(
                request_id,
                list(prompt_ids),
                params,
                seed_hash,
                list(choices),
                self.now_s,
                priority,
                router_id,
                number,
            )
        )

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._handle(AbortRequest(request_id, choice))

    def reset_prefix_cache(self) -> None:
        self._handle(ResetPrefixCache())

    def step(self) -> StepOutput:
        output = self.core.step(self.now_s)
        self.now_s = output.now_s
        self.steps.append(output)
        for out in output.tokens:
            self.results[out.request_id, out.choice].take(out)
        events = output.events
        if events.cleared:
            self.known_hashes.clear()
        self.known_hashes.difference_update(events.removed)
        self.known_hashes.update(events.stored)
        assert self.known_hashes == set(self.core.reported_hashes())
        self.core.check_integrity()
        return output

    def run(self, max_steps: int = 100_000) -> None:
        """Step until everything has ended."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            output = self.step()
            assert output.num_batched_tokens, "a step without progress"
        raise AssertionError(f"still work after {max_steps} steps")

    def result(self, request_id: str, choice: int = 0) -> ChoiceResult:
        return self.results[request_id, choice]

    def _handle(self, command: Command) -> None:
        for out in self.core.handle(command, self.now_s):
            self.results[out.request_id, out.choice].take(out)
        self.core.check_integrity()


def next_token(context: Sequence[int], params: SamplingParams, choice: int, position: int) -> int:
    """Never a stop id before `min_tokens`."""
    token_id = _digest(context, params.seed, choice, position) % VOCAB_SIZE
    while position < params.min_tokens and token_id in params.stop_token_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def hash_logprob(context: Sequence[int], token_id: int) -> TokenLogprob:
    value = (_digest(context, token_id) % 1000 + 1) / 1000
    return TokenLogprob(token_id, math.log(value))


def naive_output(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    choice: int = 0,
    token_limit: int = 1 << 30,
    output_ids: Sequence[int] = (),
) -> tuple[list[int], FinishReason]:
    """All output tokens, those of `output_ids` included, and why they end."""
    context = [*prompt_ids, *output_ids]
    limit = min(token_limit, len(prompt_ids) + params.max_tokens)
    output = list(output_ids)
    while len(context) < limit:
        token_id = next_token(context, params, choice, len(output))
        context.append(token_id)
        output.append(token_id)
        if token_id in params.stop_token_ids:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def naive_prompt_logprobs(prompt_ids: Sequence[int]) -> list[TokenLogprob | None]:
    logprobs: list[TokenLogprob | None] = [None]
    logprobs += [hash_logprob(prompt_ids[:i], prompt_ids[i]) for i in range(1, len(prompt_ids))]
    return logprobs


def _digest(context: Sequence[int], *rest: int) -> int:
    data = array("q", [*rest, *context]).tobytes()
    return int.from_bytes(blake2b(data, digest_size=7).digest(), "little")
