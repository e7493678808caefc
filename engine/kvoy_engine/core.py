"""The engine's core: commands in, tokens, block events and load out; one step is three lines.

Synchronous and without I/O: the caller owns the thread and the clock. `EngineCore` turns messages
into sequences and a runner's results into tokens; the scheduler decides what is computed.
"""

from __future__ import annotations

from kvoy_contract.blocks import BlockHash
from kvoy_engine.batch import Batch, Runner, RunnerOutput
from kvoy_engine.block_pool import BlockPool
from kvoy_engine.core_config import CoreConfig
from kvoy_engine.messages import (
    AbortRequest,
    AddRequest,
    BlockEvents,
    Command,
    ErrorKind,
    FinishReason,
    Load,
    ResetPrefixCache,
    StepOutput,
    TokenLogprob,
    TokensOut,
)
from kvoy_engine.pace import PaceModel
from kvoy_engine.scheduler import Scheduler
from kvoy_engine.sequence import Request, Sequence, Status

__all__ = ["CoreConfig", "EngineCore"]


class EngineCore:
    """Times are seconds on the caller's one monotonic clock."""

    def __init__(self, runner: Runner, config: CoreConfig) -> None:
        self.runner = runner
        self.config = config
        self._pool = BlockPool(config.num_blocks, config.hash_stride // config.block_size)
        self._pace = PaceModel()
        self._scheduler = Scheduler(config, self._pool, self._pace)
        self._requests: dict[str, Request] = {}
        self._next_seq_id = 0
        self._admitted: list[tuple[str, int]] = []
        self._generated_tokens = 0
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return self._scheduler.has_work

    def handle(self, command: Command, now_s: float) -> list[TokensOut]:
        """Take one command, between steps. Returns what ends at once: refusals and aborts.

        Raises ValueError for a request id that is still live or a request without a prompt.
        """
        match command:
            case AddRequest():
                return self._add(command)
            case AbortRequest():
                return self._abort(command)
            case ResetPrefixCache():
                self._pool.reset()
                return []

    def step(self, now_s: float) -> StepOutput:
        """`now_s` is the time before the step; the output's is the runner's duration later."""
        batch = self.schedule(now_s)
        output = self.runner.run(batch)
        return self.update(batch, output, now_s + output.duration_s)

    def schedule(self, now_s: float) -> Batch:
        return self._scheduler.schedule(now_s)

    def update(self, batch: Batch, output: RunnerOutput, now_s: float) -> StepOutput:
        """Apply the results of the last scheduled batch. `now_s` is the time after the step."""
        scheduler = self._scheduler
        shape = scheduler.shape
        tokens: list[TokensOut] = []
        for seq, row, result in zip(scheduler.scheduled, batch.rows, output.rows, strict=True):
            if seq.status is Status.FINISHED:
                continue  # aborted, or ended by the error of a sibling in this very step
            if result.error is not None:
                tokens += self._fail(seq, result.error)
                continue
            scheduler.advance(seq, len(row.token_ids))
            if row.wants_prompt_logprobs and seq.prompt_logprobs is not None:
                seq.prompt_logprobs += result.prompt_logprobs
            if row.samples:
                assert result.token_id is not None, f"no token for {seq.request.request_id}"
                tokens.append(self._append(seq, result.token_id, result.logprob))
            elif seq.status is Status.DECODING:
                tokens.append(self._end(seq, FinishReason.LENGTH))
        self._pace.observe(shape, output.duration_s)
        self._num_steps += 1
        return self._report(
            now_s,
            tokens,
            step_s=output.duration_s,
            num_batched_tokens=shape.num_decodes + shape.prefill_tokens,
            num_decodes=shape.num_decodes,
        )

    def report(self, now_s: float, tokens: list[TokensOut] | None = None) -> StepOutput:
        """The state after commands that no step follows: events, load and admitted requests."""
        return self._report(now_s, tokens or [])

    def load(self) -> Load:
        scheduler, pool, pace = self._scheduler, self._pool, self._pace
        return Load(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            free_blocks=pool.num_free,
            evictable_blocks=pool.num_evictable,
            total_blocks=pool.num_blocks,
            prefill_tokens_per_s=pace.prefill_tokens_per_s,
            step_time_s=pace.step_time_s,
            running_tokens=scheduler.running_tokens,
            num_preemptions=scheduler.num_preemptions,
            generated_tokens=self._generated_tokens,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            num_steps=self._num_steps,
        )

    def drain_events(self) -> BlockEvents:
        return self._pool.drain_events()

    def drain_admitted(self) -> list[tuple[str, int]]:
        """(router_id, number) of the requests taken or refused since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def reported_hashes(self) -> list[BlockHash]:
        """All hashes that the events so far add up to, those not yet drained included."""
        return self._pool.reported_hashes()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()
        live = {id(seq) for request in self._requests.values() for seq in request.live.values()}
        assert len(live) == self._scheduler.num_running + self._scheduler.num_waiting

    def _report(
        self,
        now_s: float,
        tokens: list[TokensOut],
        step_s: float = 0.0,
        num_batched_tokens: int = 0,
        num_decodes: int = 0,
    ) -> StepOutput:
        return StepOutput(
            now_s,
            tokens,
            self.drain_events(),
            self.load(),
            self.drain_admitted(),
            step_s,
            num_batched_tokens,
            num_decodes,
        )

    # Commands

    def _add(self, message: AddRequest) -> list[TokensOut]:
        if message.request_id in self._requests:
            raise ValueError(f"request {message.request_id} is already here")
        if not message.prompt_ids or not message.choices:
            raise ValueError(f"request {message.request_id} has no prompt or no choices")
        if message.router_id:
            self._admitted.append((message.router_id, message.number))
        refusal = self._refusal(message)
        if refusal is not None:
            return refusal
        request = Request(message, self.config)
        ended = []
        for start in message.choices:
            self._next_seq_id += 1
            seq = Sequence(self._next_seq_id, request, start, self.config)
            reason = _finish_reason(seq)
            scores_prompt = seq.prompt_logprobs is not None and not seq.output_ids
            if reason is not None and not scores_prompt:
                ended.append(_tokens_out(seq, [], finish_reason=reason))
                continue
            request.live[seq.choice] = seq
            self._scheduler.add(seq)
        if request.live:
            self._requests[request.request_id] = request
        return ended

    def _refusal(self, message: AddRequest) -> list[TokensOut] | None:
        config = self.config
        longest = max(len(start.output_ids) for start in message.choices)
        num_tokens = len(message.prompt_ids) + min(max(longest, 1), message.params.max_tokens)
        if num_tokens > config.token_limit:
            kind = ErrorKind.TOO_LONG
            holder = (
                "The context of this model"
                if config.token_limit == config.max_model_len
                else "The KV cache of this engine"
            )
            error = (
                f"{holder} holds {config.token_limit} tokens. The prompt has "
                f"{len(message.prompt_ids)}, and at least {num_tokens} are needed."
            )
        elif self._scheduler.num_waiting >= config.max_waiting:
            kind = ErrorKind.SATURATED
            error = f"{self._scheduler.num_waiting} sequences are waiting already."
        else:
            return None
        return [
            TokensOut(
                message.request_id,
                start.index,
                [],
                finish_reason=FinishReason.ERROR,
                error=error,
                error_kind=kind,
            )
            for start in message.choices
        ]

    def _abort(self, message: AbortRequest) -> list[TokensOut]:
        request = self._requests.get(message.request_id)
        if request is None:
            return []
        if message.choice is None:
            ended = list(request.live.values())
        else:
            ended = [request.live[message.choice]] if message.choice in request.live else []
        return [self._end(seq, FinishReason.ABORT) for seq in ended]

    # Ends

    def _append(self, seq: Sequence, token_id: int, logprob: TokenLogprob | None) -> TokensOut:
        """Take a sampled token, and end the sequence when it was the last one."""
        seq.output_ids.append(token_id)
        self._generated_tokens += 1
        reason = _finish_reason(seq)
        out = _tokens_out(seq, [token_id], logprob, reason)
        if reason is not None:
            self._drop(seq)
            self._scheduler.finish(seq)
        return out

    def _end(self, seq: Sequence, reason: FinishReason) -> TokensOut:
        out = _tokens_out(seq, [], finish_reason=reason)
        self._drop(seq)
        self._scheduler.finish(seq)
        return out

    def _fail(self, seq: Sequence, error: str) -> list[TokensOut]:
        """End the whole request of a broken row; nothing that it computed stays cached.

        The first choice goes last: it made the blocks of the prompt, which the others use too.
        """
        outs = []
        for sibling in reversed(list(seq.request.live.values())):
            outs.append(_tokens_out(sibling, [], finish_reason=FinishReason.ERROR, error=error))
            self._drop(sibling)
            self._scheduler.discard(sibling)
        return outs

    def _drop(self, seq: Sequence) -> None:
        request = seq.request
        del request.live[seq.choice]
        if not request.live:
            del self._requests[request.request_id]


def _finish_reason(seq: Sequence) -> FinishReason | None:
    """Why a sequence ends with its last token, if it does.

    `min_tokens` needs no look here: until then the runner samples no stop id.
    """
    output_ids = seq.output_ids
    if output_ids and output_ids[-1] in seq.stop_ids:
        return FinishReason.STOP
    if len(seq.prompt_ids) + len(output_ids) >= seq.token_limit:
        return FinishReason.LENGTH
    return None


def _tokens_out(
    seq: Sequence,
    token_ids: list[int],
    logprob: TokenLogprob | None = None,
    finish_reason: FinishReason | None = None,
    error: str | None = None,
) -> TokensOut:
    """Hands out the prompt's logprobs, once, when all its prompt is computed."""
    prompt_logprobs = None
    if seq.prompt_logprobs is not None and seq.status is Status.DECODING:
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
    scheduled_s = seq.first_scheduled_s
    return TokensOut(
        seq.request.request_id,
        seq.choice,
        token_ids,
        None if logprob is None else [logprob],
        finish_reason,
        seq.num_cached_tokens,
        prompt_logprobs,
        error,
        seq.num_preemptions,
        0.0 if scheduled_s is None else scheduled_s - seq.request.arrival_s,
        None if error is None else ErrorKind.BROKEN,
    )
