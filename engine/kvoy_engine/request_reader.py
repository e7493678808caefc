"""A client's body to everything that the core needs, or to the error that names what is wrong with
it.

Parsing, tokenising and checking: pure but for the tokenizer, so that a large body can be prepared
in a worker thread while the event loop goes on.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoy_contract.blocks import unpack_tokens
from kvoy_contract.envelope import Envelope, ResumeState
from kvoy_contract.errors import BadRequest
from kvoy_contract.openai_parse import parse_chat, parse_completion
from kvoy_contract.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from kvoy_engine.messages import AddRequest, ChoiceStart, SamplingParams
from kvoy_engine.sampling_params import check_token_ids, sampling_params
from kvoy_engine.served_model import ServedModel


class Endpoint(enum.StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt of a request; the choices that continue it follow each other in the answer."""

    token_ids: list[int]
    params: SamplingParams
    first_index: int
    """Of its choices, in the answer."""
    text: str | None = None
    """As the client wrote it, where it did."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    endpoint: Endpoint
    request: GenerationRequest
    jobs: tuple[PromptJob, ...]
    seed_hash: bytes
    envelope: Envelope | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(job.token_ids) for job in self.jobs)

    @property
    def priority(self) -> int:
        """Lower first. A router knows more about it than the client's body."""
        told = None if self.envelope is None else self.envelope.priority
        return self.request.priority if told is None else told

    @property
    def wants_token_ids(self) -> bool:
        return self.envelope is not None and self.envelope.want_token_ids

    @property
    def echoes(self) -> bool:
        return isinstance(self.request, CompletionRequest) and self.request.echo

    @property
    def resume(self) -> ResumeState | None:
        """How far another engine has come; None for a request that begins."""
        return None if self.envelope is None else self.envelope.resume

    def resumed_ids(self, choice: int) -> list[int]:
        """What another engine has generated for a choice; empty for a request that begins."""
        return [] if self.resume is None else self.resume.output_ids[choice]

    def has_begun(self, choice: int) -> bool:
        """Whether another engine has said something of it."""
        resume = self.resume
        return resume is not None and (bool(resume.output_ids[choice]) or choice in resume.begun)

    def has_ended(self, choice: int) -> bool:
        """Whether another engine has told its finish reason."""
        return self.resume is not None and choice in self.resume.ended


class RequestReader:
    """Prepares requests for one served model."""

    def __init__(self, model: ServedModel, seed: int | None = None) -> None:
        """`seed` makes the seeds of requests that bring none a fixed series."""
        self._model = model
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()

    def prepare(
        self, endpoint: Endpoint, body: bytes, envelope: Envelope | None = None
    ) -> PreparedRequest:
        """Raises BadRequest, ContextLengthExceeded or ModelNotFound, naming the field."""
        request: GenerationRequest
        request = parse_chat(body) if endpoint is Endpoint.CHAT else parse_completion(body)
        self._model.check_name(request.model)
        prompts = self._prompts(request, envelope)
        seed = self._seed(request, envelope)
        texts = _prompt_texts(request, len(prompts))
        jobs = tuple(
            PromptJob(
                token_ids,
                self._params(request, token_ids, seed),
                number * request.n,
                texts[number],
            )
            for number, token_ids in enumerate(prompts)
        )
        prepared = PreparedRequest(
            endpoint, request, jobs, self._model.seed_hash(request.cache_salt), envelope
        )
        _check_resume(prepared, self._model.limits.vocab_size)
        return prepared

    def _prompts(self, request: GenerationRequest, envelope: Envelope | None) -> list[list[int]]:
        """Token ids of every prompt: the router's, when its tokenizer is ours, else our own."""
        if envelope is not None and self._can_trust(envelope) and _has_one_prompt(request):
            return [list(unpack_tokens(envelope.token_ids))]
        max_tokens = self._model.limits.max_model_len
        if isinstance(request, ChatCompletionRequest):
            return [self._model.encoder.encode_chat(request, max_tokens)]
        assert isinstance(request, CompletionRequest)
        return self._model.encoder.encode_prompts(request, max_tokens)

    def _can_trust(self, envelope: Envelope) -> bool:
        has_ids = bool(envelope.token_ids)
        return has_ids and envelope.tokenizer_digest == self._model.tokenizer.digest

    def _params(
        self, request: GenerationRequest, token_ids: list[int], seed: int
    ) -> SamplingParams:
        param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
        if not token_ids:
            raise BadRequest(f"`{param}` has no tokens.", param=param)
        check_token_ids(token_ids, self._model.limits.vocab_size, param)
        return sampling_params(request, len(token_ids), self._model.limits, seed)

    def _seed(self, request: GenerationRequest, envelope: Envelope | None) -> int:
        if request.seed is not None:
            return request.seed
        if request.temperature == 0:
            return 0  # greedy draws nothing; a simulated model then repeats itself, too
        if envelope is not None and envelope.seed is not None:
            return envelope.seed
        return self._random.getrandbits(64)


class CommandFactory:
    """Turns prepared requests into commands with ids of their own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ids = itertools.count(1)

    def commands(self, prepared: PreparedRequest, skip: frozenset[int]) -> list[AddRequest]:
        """One command per prompt, without the choices (indexes in the answer) in `skip`.

        The router's number goes with the last one: when it is admitted, all are.
        """
        commands = [
            command
            for job in prepared.jobs
            if (command := self._command(prepared, job, skip)) is not None
        ]
        envelope = prepared.envelope
        if commands and envelope is not None:
            last = commands[-1]
            commands[-1] = AddRequest(
                last.request_id,
                last.prompt_ids,
                last.params,
                last.seed_hash,
                last.choices,
                last.arrival_s,
                last.priority,
                envelope.router_id,
                envelope.number,
            )
        return commands

    def _command(
        self, prepared: PreparedRequest, job: PromptJob, skip: frozenset[int]
    ) -> AddRequest | None:
        choices = [
            ChoiceStart(choice, prepared.resumed_ids(job.first_index + choice))
            for choice in range(prepared.request.n)
            if job.first_index + choice not in skip
        ]
        if not choices:
            return None
        return AddRequest(
            str(next(self._ids)),
            job.token_ids,
            job.params,
            prepared.seed_hash,
            choices,
            self._clock(),
            prepared.priority,
        )


def _has_one_prompt(request: GenerationRequest) -> bool:
    return not isinstance(request, CompletionRequest) or len(request.prompts) == 1


def _prompt_texts(request: GenerationRequest, num_prompts: int) -> Sequence[str | None]:
    if isinstance(request, CompletionRequest):
        return [prompt if isinstance(prompt, str) else None for prompt in request.prompts]
    return [None] * num_prompts


def _check_resume(prepared: PreparedRequest, vocab_size: int) -> None:
    """A resumed request brings one list of ids for every choice, none longer than its limit."""
    resume, request, jobs = prepared.resume, prepared.request, prepared.jobs
    if resume is None:
        return
    lists = resume.output_ids
    if len(lists) != request.n * len(jobs):
        raise BadRequest("`resume` must have one list of ids for every choice.", param="resume")
    for index, output_ids in enumerate(lists):
        check_token_ids(output_ids, vocab_size, "resume")
        if len(output_ids) > jobs[index // request.n].params.max_tokens:
            raise BadRequest("`resume` is longer than the output limit.", param="resume")
    if not all(0 <= choice < len(lists) for choice in (*resume.begun, *resume.ended)):
        raise BadRequest("`resume` names a choice that there is not.", param="resume")
    if prepared.echoes and request.num_logprobs is not None:
        for job in jobs:
            choices = range(job.first_index, job.first_index + request.n)
            if len({prepared.has_begun(choice) for choice in choices}) > 1:
                # Only a choice that begins brings the prompt's logprobs, for all of them.
                raise BadRequest(
                    "`resume` has begun some choices of a scored echo and not others.",
                    param="resume",
                )
