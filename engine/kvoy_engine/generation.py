"""One request in progress: step outputs in, pieces of text out, usage and metrics kept on the way.

It owns the choices' detokenisers and decides when a stop string has ended one. It knows nothing of
HTTP and of the shape of answers.
"""

from __future__ import annotations

from collections.abc import Callable

from kvoy_contract.errors import (
    ApiError,
    ContextLengthExceeded,
    EngineFailed,
    Saturated,
)
from kvoy_contract.openai_requests import ChatCompletionRequest
from kvoy_contract.openai_responses import CompletionUsage, usage
from kvoy_engine.choice_text import ChoiceText, Echo, plain_echo, scored_echo
from kvoy_engine.link import OutputStream
from kvoy_engine.messages import ErrorKind, FinishReason, TokensOut
from kvoy_engine.metrics import EngineMetrics
from kvoy_engine.pieces import Piece
from kvoy_engine.request_reader import CommandFactory, PreparedRequest, PromptJob
from kvoy_engine.served_model import ServedModel

SATURATED_RETRY_S = 1.0


class _Prompt:
    """One prompt's part of a generation."""

    __slots__ = ("deferred", "echo", "is_begun", "job", "num_cached_tokens")

    def __init__(self, job: PromptJob, echo: Echo | None) -> None:
        self.job = job
        self.echo = echo
        """What every choice repeats first; None until choice 0 brings the prompt's logprobs."""
        self.num_cached_tokens = 0
        self.is_begun = False
        self.deferred: list[TokensOut] = []
        """What other choices said before that; few, as they wait for choice 0 to compute the
        prompt.
        """


class Generation:
    """Entity of one request; its owner is the request's task."""

    def __init__(
        self,
        prepared: PreparedRequest,
        model: ServedModel,
        factory: CommandFactory,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._prepared = prepared
        self._metrics = metrics
        self._clock = clock
        self._encoder = model.encoder
        self.arrival_s = clock()
        request = prepared.request
        self._prompts = [
            _Prompt(job, plain_echo(prepared, job, model.encoder)) for job in prepared.jobs
        ]
        self._choices = [
            ChoiceText(prepared, prompt.job, choice, model.encoder)
            for prompt in self._prompts
            for choice in range(request.n)
        ]
        skip = frozenset(choice.index for choice in self._choices if choice.is_finished)
        self.commands = factory.commands(prepared, skip)
        jobs_by_request = iter(
            prompt
            for prompt in self._prompts
            if any(prompt.job.first_index + c not in skip for c in range(request.n))
        )
        self._by_request = {command.request_id: next(jobs_by_request) for command in self.commands}
        self._failure: ApiError | None = None
        self._last_token_s: dict[int, float] = {}
        self.queue_time_s: float | None = None
        """Until the core turned to its first prompt; None before."""
        self.first_token_s: float | None = None

    @property
    def usage(self) -> CompletionUsage:
        """So far. Every prompt counts once, completions are summed over the choices."""
        return usage(
            self._prepared.num_prompt_tokens,
            sum(choice.num_tokens for choice in self._choices),
            self.num_cached_tokens,
        )

    @property
    def num_cached_tokens(self) -> int:
        """As the client is told: of a request that began elsewhere, what was found there."""
        resume = self._prepared.resume
        if resume is not None and resume.cached_tokens is not None:
            return resume.cached_tokens
        return sum(prompt.num_cached_tokens for prompt in self._prompts)

    @property
    def num_new_tokens(self) -> int:
        """Generated here; those that a resumed request brought along are left out."""
        return sum(choice.num_new_tokens for choice in self._choices)

    @property
    def started_prompt_lengths(self) -> list[int]:
        """Tokens of each prompt that the core has begun to answer."""
        return [len(prompt.job.token_ids) for prompt in self._prompts if prompt.is_begun]

    @property
    def resumed(self) -> frozenset[int]:
        """Choices that began on another engine."""
        return frozenset(choice.index for choice in self._choices if choice.is_resumed)

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self._choices)

    def opening_pieces(self) -> list[Piece]:
        """What is there before any step: the end of choices that a resumed request brought
        complete, unless the client knows it.
        """
        return [
            choice.end_piece()
            for choice in self._choices
            if choice.is_finished and not choice.has_told_end
        ]

    async def next_pieces(self, stream: OutputStream) -> list[Piece]:
        """What the next step outputs say; only while unfinished.

        Raises EngineFailed, ContextLengthExceeded or Saturated as the core ended the request.
        """
        if self._failure is not None:
            raise self._failure
        pieces: list[Piece] = []
        outs = await stream.take()
        if not outs:
            raise EngineFailed("The engine ended this request without finishing it.")
        for out in outs:
            if out.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                if not pieces:
                    raise self._error(out)
                self._failure = self._error(out)
                break  # what was said before it is still told
            prompt = self._by_request[out.request_id]
            self._learn(prompt, out)
            if prompt.echo is None:
                prompt.deferred.append(out)
                continue
            ready, prompt.deferred = [out, *prompt.deferred], []
            for each in ready:
                choice = self._choices[prompt.job.first_index + each.choice]
                if not choice.is_finished:  # else a stop string in an earlier one has ended it
                    pieces.append(self._piece(choice, prompt.echo, each, stream))
        return pieces

    def _learn(self, prompt: _Prompt, out: TokensOut) -> None:
        """What an output says about the prompt as a whole."""
        if not prompt.is_begun:
            prompt.is_begun = True
            prompt.num_cached_tokens = out.num_cached_tokens
            self._metrics.queue_time.observe(out.queue_time_s)
            if self.queue_time_s is None:
                self.queue_time_s = out.queue_time_s
        if prompt.echo is None and out.prompt_logprobs is not None:
            prompt.echo = scored_echo(
                self._prepared, prompt.job, self._encoder, out.prompt_logprobs
            )

    def _piece(self, choice: ChoiceText, echo: Echo, out: TokensOut, stream: OutputStream) -> Piece:
        self._observe_times(choice.index, out)
        piece = choice.push(out, echo)
        if piece.finish_reason is not None:
            stream.end_choice(out.request_id, out.choice)
            self._metrics.on_choice_end(piece.finish_reason)
        return piece

    def _observe_times(self, index: int, out: TokensOut) -> None:
        if not out.token_ids:
            return
        now_s = self._clock()
        if not self._last_token_s:
            self.first_token_s = now_s
            self._metrics.ttft.observe(now_s - self.arrival_s)
        previous_s = self._last_token_s.get(index)
        if previous_s is not None:
            self._metrics.inter_token.observe(now_s - previous_s)
        self._last_token_s[index] = now_s

    def _error(self, out: TokensOut) -> ApiError:
        message = out.error or "The engine ended this request."
        if out.error_kind is ErrorKind.TOO_LONG:
            is_chat = isinstance(self._prepared.request, ChatCompletionRequest)
            return ContextLengthExceeded(message, param="messages" if is_chat else "prompt")
        if out.error_kind is ErrorKind.SATURATED:
            return Saturated(message, retry_after_s=SATURATED_RETRY_S)
        if out.error_kind is ErrorKind.BROKEN:
            self._metrics.corrupted.inc()
        return EngineFailed(message)
