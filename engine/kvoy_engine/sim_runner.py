"""A runner that computes nothing: steps take a timing model's time and tokens are a fixed function.

The token of (seed, choice, position) is drawn from a vocabulary, by default the printable ASCII of
the byte tokenizer, so that text, stop strings and streaming look real and any engine continues any
other. There are no logits: logprobs are those of a uniform draw from the vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

from kvoy_engine.batch import Batch, Row, RowOutput, RunnerInfo, RunnerOutput
from kvoy_engine.messages import SamplingParams, TokenLogprob
from kvoy_engine.timing_model import TimingModel

PRINTABLE_ASCII = tuple(range(0x20, 0x7F))
"""Ids of the byte tokenizer that are single characters."""
_FORCING_BIAS = 50.0
"""A logit bias of this size decides between equally likely tokens: above it the token is always
chosen, below its negative never."""


class SimRunner:
    """Satisfies `batch.Runner`.

    A step ends `duration_s` after it began, or after the one before it ended if that was within
    `max_credit_s`: lateness of the sleep and work between two steps do not add up under load, so
    that the engine keeps the model's pace while it is busy.
    """

    def __init__(
        self,
        model: TimingModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        block_bytes: int = 0,
        max_model_len: int = 32_768,
        vocab_size: int = 256,
        token_ids: Sequence[int] = PRINTABLE_ASCII,
        max_credit_s: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`token_ids` are the ids that it samples; all below `vocab_size`."""
        if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ValueError(f"token_ids must lie in 0 .. vocab_size - 1 = {vocab_size - 1}")
        self._model = model
        self._token_ids = tuple(token_ids)
        self._allowed = frozenset(token_ids)
        self._logprob = -math.log(len(self._token_ids))
        self._max_credit_s = max_credit_s
        self._clock = clock
        self._sleep = sleep
        self._ended_s = -math.inf
        names = blake2b(digest_size=8, person=b"kvoy-sim")
        names.update(repr(self._token_ids).encode())
        self._info = RunnerInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            block_bytes=block_bytes,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            numerics=f"sim-{names.hexdigest()}",
            details={"runner": "sim", "timing": repr(model)},
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, batch: Batch) -> RunnerOutput:
        """Takes the model's time on the real clock; reports exactly that time."""
        began_s = self._clock()
        duration_s = self._model.duration_s(batch)
        if began_s - self._ended_s <= self._max_credit_s:
            began_s = self._ended_s
        rows = [self._output(row) for row in batch.rows]
        self._ended_s = began_s + duration_s
        left_s = self._ended_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        return RunnerOutput(rows, duration_s)

    def free_device_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is held."""

    def _output(self, row: Row) -> RowOutput:
        prompt_logprobs = self._prompt_logprobs(row) if row.wants_prompt_logprobs else ()
        if not row.samples:
            return RowOutput(prompt_logprobs=prompt_logprobs)
        token_id = self._sample(row)
        logprob = None
        if row.params.logprobs is not None:
            logprob = self._token_logprob(token_id, row.params.logprobs)
        return RowOutput(token_id, logprob, prompt_logprobs)

    def _sample(self, row: Row) -> int:
        params = row.params
        position = len(row.output_ids)
        index = _draw(params.seed, row.choice, position, len(self._token_ids))
        if params.logit_bias:
            forced = self._forced(params, position)
            if forced is not None:
                return forced
        for offset in range(len(self._token_ids)):
            token_id = self._token_ids[(index + offset) % len(self._token_ids)]
            if not _is_banned(token_id, params, position):
                return token_id
        # Everything is banned. A model's softmax has no answer then either; any token will do.
        return self._token_ids[index]

    def _forced(self, params: SamplingParams, position: int) -> int | None:
        """The token of the greatest bias, if that bias decides."""
        bias, token_id = max(
            (
                (bias, -token_id)
                for token_id, bias in params.logit_bias.items()
                if not _is_banned(token_id, params, position)
            ),
            default=(0.0, 0),
        )
        return -token_id if bias >= _FORCING_BIAS else None

    def _prompt_logprobs(self, row: Row) -> list[TokenLogprob]:
        first = row.start + 1
        end = min(row.start + len(row.token_ids) + 1, len(row.prompt_ids))
        num_top = row.params.prompt_logprobs or 0
        return [self._token_logprob(row.prompt_ids[i], num_top) for i in range(first, end)]

    def _token_logprob(self, token_id: int, num_top: int) -> TokenLogprob:
        """All tokens of the vocabulary are equally likely; the given one counts as the first of
        them."""
        others = (t for t in self._token_ids if t != token_id)
        top = [token_id, *others][:num_top] if num_top else []
        return TokenLogprob(token_id, self._logprob, [(t, self._logprob) for t in top])


def _draw(seed: int, choice: int, position: int, num_values: int) -> int:
    """A number below `num_values` that depends on the arguments alone."""
    data = (
        (seed & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
        + choice.to_bytes(4, "little")
        + position.to_bytes(4, "little")
    )
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") % num_values


def _is_banned(token_id: int, params: SamplingParams, position: int) -> bool:
    return (
        token_id in params.banned_token_ids
        or (position < params.min_tokens and token_id in params.stop_token_ids)
        or (bool(params.logit_bias) and params.logit_bias.get(token_id, 0.0) <= -_FORCING_BIAS)
    )
