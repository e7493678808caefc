"""One served model: its endpoints, and what its traffic has taught."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from kvoy_router.cost import Traffic
from kvoy_router.endpoint import Endpoint, EngineInfo
from kvoy_router.homes import Homes
from kvoy_router.lease import Lease
from kvoy_router.request import InferenceRequest

FIRST_OUTPUT_TOKENS = 256.0
"""Expected answer before any has been seen."""
FIRST_PROMPT_TOKENS = 1_000.0
FIRST_REUSE = 0.5
OUTPUT_MEMORY = 0.05
REUSE_MEMORY = 0.02
"""Share of each new sample in a moving mean: the last twenty answers, the last fifty prompts."""


class Model:
    __slots__ = (
        "_usual",
        "endpoints",
        "homes",
        "is_declared",
        "name",
        "output_tokens",
        "prompt_tokens",
        "reuse",
        "turn",
        "weights",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.endpoints: list[Endpoint] = []
        self.is_declared = False
        self.weights: dict[str, int] = {}
        """Service → weight, of every service that is to serve this name."""
        self.output_tokens = FIRST_OUTPUT_TOKENS
        """Moving mean of an answer's length."""
        self.reuse = FIRST_REUSE
        """Moving mean of the share of a prompt that some endpoint held already."""
        self.prompt_tokens = FIRST_PROMPT_TOKENS
        """Moving mean of a prompt's length."""
        self.homes = Homes()
        self.turn = 0
        """Where round-robin would go next: see `next_in_turn`."""
        self._usual: dict[str | None, EngineInfo | None] = {}
        """What `usual_info` has found since the endpoints or their descriptions last changed."""

    @property
    def is_listed(self) -> bool:
        return self.is_declared or bool(self.weights) or bool(self.endpoints)

    def join(self, endpoint: Endpoint) -> None:
        self.endpoints.append(endpoint)
        self.homes.know(endpoint.id)
        self._usual.clear()

    def leave(self, endpoint: Endpoint) -> bool:
        """Whether it was there."""
        if endpoint not in self.endpoints:
            return False
        self.endpoints.remove(endpoint)
        self.homes.forget(endpoint.id)
        self._usual.clear()
        return True

    def on_describe(self) -> None:
        """An endpoint describes itself otherwise than before."""
        self._usual.clear()

    def usual_info(self, service: str | None = None) -> EngineInfo | None:
        """How this model's engines, or one service's of them, hash and tokenise: as most of them
        do. None while nobody has said. Every request asks, so the answer is kept."""
        if service not in self._usual:
            self._usual[service] = _usual_of(
                endpoint.info
                for endpoint in self.endpoints
                if endpoint.info is not None and service in (None, endpoint.origin.service)
            )
        return self._usual[service]

    def traffic(self, request: InferenceRequest) -> Traffic:
        output_tokens = self.output_tokens
        if request.max_tokens is not None:
            output_tokens = min(output_tokens, float(request.max_tokens))
        return Traffic(output_tokens=output_tokens * request.num_choices, reuse=self.reuse)

    @property
    def expected(self) -> Traffic:
        """An average request."""
        return Traffic(output_tokens=self.output_tokens, reuse=self.reuse)

    def next_in_turn(self) -> Endpoint:
        """The engine that plain round-robin would take for this request: the counterfactual of the
        self-audit. One that cannot serve loses its turn; the last one is told where none can."""
        for _ in range(len(self.endpoints)):
            endpoint = self.endpoints[self.turn % len(self.endpoints)]
            self.turn += 1
            if endpoint.is_routable:
                break
        return endpoint

    def learn_prompt(self, held_tokens: int, prompt_tokens: int) -> None:
        share = held_tokens / prompt_tokens if prompt_tokens else 0.0
        self.reuse += REUSE_MEMORY * (share - self.reuse)
        self.prompt_tokens += REUSE_MEMORY * (prompt_tokens - self.prompt_tokens)

    def learn_output(self, lease: Lease, now_s: float, output_tokens: int | None) -> None:
        """Where nobody counted, the time from the first token tells in steps of the engine."""
        if output_tokens is None:
            load = lease.endpoint.load
            if lease.first_token_s is None or load is None or load.step_time_s <= 0.0:
                return
            output_tokens = 1 + round((now_s - lease.first_token_s) / load.step_time_s)
        self.output_tokens += OUTPUT_MEMORY * (output_tokens - self.output_tokens)


def _usual_of(infos: Iterable[EngineInfo]) -> EngineInfo | None:
    """Of those that hash and tokenise as most do, the one with the longest context: prompts beyond
    it are refused before they are encoded."""
    counts: Counter[tuple[str, int, int, str]] = Counter()
    longest: dict[tuple[str, int, int, str], EngineInfo] = {}
    for info in infos:
        way = (info.model_identity, info.block_size, info.hash_stride, info.tokenizer_digest)
        counts[way] += 1
        if way not in longest or _context(info) >= _context(longest[way]):
            longest[way] = info
    return longest[max(counts, key=counts.__getitem__)] if counts else None


def _context(info: EngineInfo) -> float:
    return info.max_model_len or math.inf
