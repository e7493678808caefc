"""Which tokens of which sequences the next step computes, and who holds which blocks.

Owns the queues and the block pool. A sequence waits (holding no blocks), prefills (chunk by chunk,
holding blocks for all its tokens) or decodes (one token a step, taking a block whenever one is
full). Each queue is kept in the order of service: priority, then arrival.

    schedule()  decodes first, then prefill chunks, then admissions, within one token budget
    advance()   tokens of a row were computed: register full blocks
    finish()    any end: everything the sequence holds is given back at once

Pure: knows no clock, no tensors, no text. `core.EngineCore` calls it and turns results into tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvoy_contract.blocks import BlockHash
from kvoy_engine.background import Background
from kvoy_engine.batch import Batch, Row
from kvoy_engine.block_pool import NO_BLOCK, BlockPool
from kvoy_engine.core_config import CoreConfig
from kvoy_engine.pace import PaceModel, StepShape
from kvoy_engine.sequence import NEVER, Sequence, SequenceQueue, Status


class Scheduler:
    def __init__(self, config: CoreConfig, pool: BlockPool, pace: PaceModel) -> None:
        self._config = config
        self._pool = pool
        self._pace = pace
        self._background = Background(config.background_ratio, pace)
        self._now_s = 0.0
        """Of the last step."""
        self._block_size = config.block_size
        self._waiting = SequenceQueue()
        self._prefilling = SequenceQueue()
        self._decoding = SequenceQueue()
        self._computing: dict[BlockHash, Sequence] = {}
        """The blocks that prefilling sequences are computing. One that needs such a block and comes
        later in the order waits for it instead of computing it as well: the siblings of a request,
        or the second question about a document."""
        self.scheduled: list[Sequence] = []
        """The sequences of the last batch's rows, in order."""
        self.shape = StepShape()
        """Of the last batch."""
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.queued_prefill_tokens = 0
        self.running_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._decoding.items or self._prefilling.items or self._waiting.items)

    # Arrival and end

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Its hashes are there if it may use the cache."""
        num_hits = len(self._pool.find_prefix(seq.hashes, self._hit_limit(seq)))
        self._count_queued(seq, seq.num_tokens - num_hits * self._block_size)
        self._background.on_arrival(seq.key[0], seq.request.arrival_s)
        self._waiting.add(seq)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, at whatever stage, and give back what it holds."""
        if seq.status is Status.WAITING:
            self._waiting.remove(seq)
        else:
            self._leave(seq)
        self._count_queued(seq, 0)
        seq.status = Status.FINISHED

    def discard(self, seq: Sequence) -> None:
        """Finish a sequence whose results are broken: what it computed does not stay cached."""
        first_own = seq.num_cached_tokens // self._block_size
        self._pool.forget(seq.block_table[first_own : seq.num_registered])
        self.finish(seq)

    # One step

    def schedule(self, now_s: float) -> Batch:
        """The next step's rows; empty only when there is no work."""
        self._now_s = now_s
        self.scheduled = []
        rows: list[Row] = []
        decode_context = self._schedule_decodes(rows)
        decodes = self.shape = StepShape(len(rows), decode_context)
        prefill_s = 0.0
        if self._prefilling.items or self._waiting.items:
            self._serve_passed_over(now_s)
            prefill_s = self._schedule_prefills(rows, now_s)
        self._background.on_step(decodes, prefill_s)
        return Batch(rows)

    def _schedule_decodes(self, rows: list[Row]) -> int:
        """One row for each decoding sequence that has or gets a block for its token."""
        decoding = self._decoding.items
        scheduled = self.scheduled
        block_size = self._block_size
        context = 0
        # In order; a preempted sequence is always the last one, so it has no row yet.
        for seq in decoding:
            start = seq.num_computed
            if start == len(seq.block_table) * block_size and not self._grow(seq):
                break
            output_ids = seq.output_ids
            rows.append(
                Row(
                    seq.seq_id,
                    (output_ids[-1],),
                    start,
                    seq.block_table,
                    True,
                    seq.params,
                    seq.choice,
                    seq.prompt_ids,
                    output_ids,
                    False,
                    seq.request.request_id,
                )
            )
            scheduled.append(seq)
            context += start + 1
        return context

    def _schedule_prefills(self, rows: list[Row], now_s: float) -> float:
        """Chunks in the order of service, as many as the budget and the streams' patience allow.
        Returns the seconds that they add to the step."""
        budget = self._config.max_num_batched_tokens - len(rows)
        allowance_s = self._allowance_s()
        num_tokens = context = 0
        work = spent_s = 0.0
        is_yielding = False
        for seq in self._in_turn(now_s):
            if not is_yielding and self._background.includes(seq, now_s):
                is_yielding = True
                allowance_s = self._background.allowance_s(self.shape, allowance_s, spent_s)
                if rows and allowance_s is not None and allowance_s <= 0:
                    break
            start = seq.num_computed
            chunk = min(seq.num_remaining, budget)
            if allowance_s is not None:
                limit = self._pace.chunk_limit(allowance_s, start)
                chunk = min(
                    chunk, limit if num_tokens else max(limit, self._config.min_chunk_tokens)
                )
            chunk_s = self._pace.chunk_s(start, chunk)
            spent_s += chunk_s
            if allowance_s is not None:
                allowance_s -= chunk_s
            if not chunk:
                break
            end = start + chunk
            rows.append(
                Row(
                    seq.seq_id,
                    seq.tokens(start, end),
                    start,
                    seq.block_table,
                    seq.samples and end == seq.num_tokens,
                    seq.params,
                    seq.choice,
                    seq.prompt_ids,
                    seq.output_ids,
                    seq.prompt_logprobs is not None,
                    seq.request.request_id,
                )
            )
            self.scheduled.append(seq)
            seq.served_s = now_s
            budget, num_tokens = budget - chunk, num_tokens + chunk
            context += end
            work += chunk * (start + chunk / 2)
            if not budget or (allowance_s is not None and allowance_s <= 0):
                break
        decodes = self.shape
        self.shape = StepShape(
            decodes.num_decodes, decodes.decode_context, num_tokens, context, work
        )
        return spent_s

    def _allowance_s(self) -> float | None:
        """Seconds that prefill may add to this step; None without a bound."""
        config, shape, pace = self._config, self.shape, self._pace
        bounds = []
        if config.max_step_s:
            bounds.append(config.max_step_s - pace.estimate_s(shape))
        if config.interference_ratio and shape.num_decodes:
            bounds.append(pace.allowance_s(shape, config.interference_ratio))
        return min(bounds, default=None)

    def _serve_passed_over(self, now_s: float) -> None:
        """Let a prompt that has yielded too long go before others."""
        seq = self._background.passed_over((self._waiting, self._prefilling), now_s)
        if seq is not None:
            queue = self._waiting if seq.status is Status.WAITING else self._prefilling
            queue.remove(seq)
            self._background.promote(seq)
            queue.add(seq)

    def _in_turn(self, now_s: float) -> Iterator[Sequence]:
        """Prefilling sequences in the order of service; a waiting one is admitted in its turn.

        By then it finds all that those before it have put into the cache. When the first one in
        the queue gets no room, those behind it wait too: a long prompt is not overtaken for ever.
        """
        prefilling, waiting = self._prefilling.items, self._waiting.items
        at = passed = 0
        has_room = True
        while True:
            while passed < len(waiting) and self._is_blocked(waiting[passed]):
                passed += 1
            candidate = waiting[passed] if has_room and passed < len(waiting) else None
            running = prefilling[at] if at < len(prefilling) else None
            if candidate is not None and (running is None or candidate.key < running.key):
                if not self._admit(candidate, now_s):
                    has_room = self._is_blocked(candidate)
                    continue
                running = candidate
            if running is None:
                return
            at += 1
            yield running

    # Blocks

    def _hit_limit(self, seq: Sequence) -> int:
        """Blocks that may come from the cache. At least one token is computed, for its logits, and
        a prompt whose own logprobs are wanted is computed whole."""
        if seq.prompt_logprobs is not None:
            return 0
        return (seq.num_tokens - 1) // self._block_size

    def _admit(self, seq: Sequence, now_s: float) -> bool:
        """Give a waiting sequence blocks for all its tokens and let it prefill, if there is room.

        False also when it is blocked on another sequence's work; see `_is_blocked`.
        """
        if self.num_running >= self._config.max_num_seqs:
            return False
        pool, block_size = self._pool, self._block_size
        limit = self._hit_limit(seq)
        hits = pool.find_prefix(seq.hashes, limit)
        num_hits = len(hits)
        seq.blocked_on = seq.hashes[num_hits] if num_hits < min(limit, len(seq.hashes)) else None
        if self._is_blocked(seq):
            return False
        num_new = -(-seq.num_tokens // block_size) - num_hits
        if num_new + pool.num_evictable_of(hits) + self._reserve() > pool.num_available:
            return False
        pool.acquire(hits)
        seq.block_table = hits + pool.allocate(num_new)
        seq.num_computed = num_hits * block_size
        seq.num_registered = num_hits
        if seq.next_full != NEVER:
            seq.next_full = seq.num_computed + block_size
        for block_hash in seq.hashes[num_hits:]:
            self._computing.setdefault(block_hash, seq)
        self._waiting.remove(seq)
        self._prefilling.add(seq)
        seq.status = Status.PREFILLING
        self.running_tokens += seq.num_computed
        self._count_queued(seq, seq.num_remaining)
        if seq.first_scheduled_s is None:
            self._count_first_run(seq, now_s)
        return True

    def _is_blocked(self, seq: Sequence) -> bool:
        """Whether a sequence that is served earlier is computing the next block that it needs."""
        if seq.blocked_on is None:
            return False
        owner = self._computing.get(seq.blocked_on)
        return owner is not None and owner.key < seq.key

    def _reserve(self) -> int:
        """Blocks that an admission leaves for the growth of the running sequences and its own."""
        if not self.num_running:
            return 0
        growth = (self.num_running + 1) * self._config.headroom_blocks
        return int(self._config.watermark * self._config.num_blocks) + growth

    def _count_first_run(self, seq: Sequence, now_s: float) -> None:
        seq.first_scheduled_s = now_s
        seq.num_cached_tokens = min(seq.num_computed, len(seq.prompt_ids))
        request = seq.request
        if not request.is_counted:
            # Once per request: its further choices share a prompt that nobody sent again.
            request.is_counted = True
            self.prompt_tokens += len(seq.prompt_ids)
            self.cached_tokens += seq.num_cached_tokens

    def _count_queued(self, seq: Sequence, num_tokens: int) -> None:
        self.queued_prefill_tokens += num_tokens - seq.queued_tokens
        seq.queued_tokens = num_tokens

    def _grow(self, seq: Sequence) -> bool:
        """Add a block to a decoding sequence, preempting from the end of the order while there is
        none.

        False when the sequence was itself the last one, and so was preempted.
        """
        while not self._pool.num_available:
            victim = self._last_running()
            self._preempt(victim)
            if victim is seq:
                return False
        seq.block_table.extend(self._pool.allocate(1))
        return True

    def _last_running(self) -> Sequence:
        decoding, prefilling = self._decoding.items, self._prefilling.items
        if not prefilling or (decoding and decoding[-1].key > prefilling[-1].key):
            return decoding[-1]
        return prefilling[-1]

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue without blocks. What it computed stays cached as long as there is room;
        the rest is computed again when it is admitted, and its output goes on where it was."""
        self._leave(seq)
        seq.status = Status.WAITING
        seq.num_computed = seq.num_registered = 0
        seq.num_preemptions += 1
        seq.served_s = self._now_s
        self.num_preemptions += 1
        if seq.prompt_logprobs is not None:
            seq.prompt_logprobs = [None]
        self.add(seq)

    def _leave(self, seq: Sequence) -> None:
        """Take a running sequence out of its queue and give back its blocks."""
        if seq.status is Status.DECODING:
            self._decoding.remove(seq)
        else:
            assert seq.status is Status.PREFILLING
            self._prefilling.remove(seq)
            for block_hash in seq.hashes[seq.num_registered :]:
                if self._computing.get(block_hash) is seq:
                    del self._computing[block_hash]
        self.running_tokens -= seq.num_computed
        self._pool.release(seq.block_table)
        # A new list: rows of a batch under way still read the old one.
        seq.block_table = []

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """The KV of its next `num_tokens` tokens is now in its blocks."""
        seq.num_computed += num_tokens
        self.running_tokens += num_tokens
        if seq.num_computed >= seq.next_full:
            self._register(seq)
        if seq.status is Status.PREFILLING:
            self._count_queued(seq, seq.num_remaining)
            if not seq.num_remaining:
                self._prefilling.remove(seq)
                self._decoding.add(seq)
                seq.status = Status.DECODING

    def _register(self, seq: Sequence) -> None:
        """Make its newly full blocks findable, taking over those that another sequence made
        first."""
        table, register = seq.block_table, self._pool.register
        first = seq.num_registered
        parent = table[first - 1] if first else NO_BLOCK
        for i in range(first, seq.num_computed // self._block_size):
            block_hash = seq.block_hash(i)
            parent = table[i] = register(table[i], block_hash, parent)
            self._computing.pop(block_hash, None)
            seq.num_registered = i + 1
        seq.next_full = (seq.num_registered + 1) * self._block_size

    def check_integrity(self) -> None:
        """Assert that queues, counters and block tables agree."""
        running = [*self._prefilling, *self._decoding]
        self._pool.check_integrity(seq.block_table for seq in running)
        for queue in (self._waiting, self._prefilling, self._decoding):
            keys = [seq.key for seq in queue]
            assert keys == sorted(keys)
        for seq in running:
            assert len(seq.block_table) * self._block_size >= seq.num_computed
            assert seq.num_registered * self._block_size <= seq.num_computed
        assert all(seq.status is Status.WAITING and not seq.block_table for seq in self._waiting)
        assert all(seq.status is Status.PREFILLING for seq in self._prefilling)
        assert all(seq.num_remaining > 0 for seq in self._prefilling)
        assert all(
            seq.status is Status.DECODING and seq.num_remaining == 1 for seq in self._decoding
        )
        assert set(self._computing.values()) <= set(self._prefilling)
        assert self.running_tokens == sum(seq.num_computed for seq in running)
        queued = sum(seq.queued_tokens for seq in [*self._waiting, *running])
        assert self.queued_prefill_tokens == queued
