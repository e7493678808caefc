"""Open workloads: shared prefixes, prompts of their own, bursts of equal ones, and mixtures.

Each is a description that a scenario file can hold, and `build(name, seed)` makes the requests of
one run of it. Names of prompt pieces begin with `name`, so that the parts of a mixture share
nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from random import Random
from typing import Self

import msgspec

from kvoy_simulate.arrivals import Arrivals
from kvoy_simulate.traffic import PromptSpec, SimRequest, Workload

Length = int | tuple[int, int]
"""Tokens: exactly so many, or evenly distributed between two bounds, both included."""


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every kind of workload has."""

    tenant: str = ""
    priority: int = 0
    """Lower runs first."""


class OpenDescription(Description, frozen=True):
    """A workload that is asked at a rate of its own."""

    arrivals: Arrivals

    def at_rate(self, rate: float) -> Self:
        """The same, asked more or less often."""
        return msgspec.structs.replace(self, arrivals=self.arrivals.at_rate(rate))


class SharedPrefix(OpenDescription, frozen=True, tag_field="kind", tag="shared-prefix"):
    """Groups of questions behind a common prefix each. All prompts come in a random order, then all
    of them in another, and so on, so each is asked equally often."""

    groups: int = 150
    questions: int = 5
    """Distinct prompts of each group."""
    prefix_tokens: int = 6000
    question_tokens: int = 1200
    output_tokens: Length = 1000

    def __post_init__(self) -> None:
        require_positive(self, "groups", "questions", "prefix_tokens", "question_tokens")
        require_length(self, "output_tokens")

    def build(self, name: str, seed: int) -> Workload:
        return OpenLoop(self._requests(name, Random(f"{name}-{seed}")))

    def _requests(self, name: str, random: Random) -> Iterator[SimRequest]:
        prompts = [
            (f"{name}/g{group}", prefix.then(f"q{question}", self.question_tokens))
            for group in range(self.groups)
            for prefix in [PromptSpec(None, f"{name}/g{group}", self.prefix_tokens)]
            for question in range(self.questions)
        ]
        deck: list[tuple[str, PromptSpec]] = []
        for number, arrival_s in enumerate(self.arrivals.times(random)):
            if not deck:
                deck = random.sample(prompts, len(prompts))
            group, prompt = deck.pop()
            yield SimRequest(
                arrival_s,
                prompt,
                draw(self.output_tokens, random),
                session=f"{name}/s{number}",
                group=group,
                priority=self.priority,
                tenant=self.tenant,
            )


class Independent(OpenDescription, frozen=True, tag_field="kind", tag="independent"):
    """Every prompt is new but for its beginning, the same in all: a system prompt, or nothing."""

    prompt_tokens: Length = 1000
    """With the shared ones."""
    shared_tokens: int = 0
    output_tokens: Length = 250

    def __post_init__(self) -> None:
        require_length(self, "prompt_tokens")
        require_length(self, "output_tokens")
        least = self.prompt_tokens if isinstance(self.prompt_tokens, int) else self.prompt_tokens[0]
        if not 0 <= self.shared_tokens < least:
            raise ValueError(
                f"shared_tokens must be in 0 .. prompt_tokens - 1 = {least - 1}, "
                f"not {self.shared_tokens}"
            )

    def build(self, name: str, seed: int) -> Workload:
        return OpenLoop(self._requests(name, Random(f"{name}-{seed}")))

    def _requests(self, name: str, random: Random) -> Iterator[SimRequest]:
        shared = PromptSpec(None, f"{name}/all", self.shared_tokens) if self.shared_tokens else None
        for number, arrival_s in enumerate(self.arrivals.times(random)):
            own_tokens = draw(self.prompt_tokens, random) - self.shared_tokens
            yield SimRequest(
                arrival_s,
                PromptSpec(shared, f"{name}/p{number}", own_tokens),
                draw(self.output_tokens, random),
                session=f"{name}/s{number}",
                group=f"{name}/all" if shared else f"{name}/p{number}",
                priority=self.priority,
                tenant=self.tenant,
            )


class Bursts(OpenDescription, frozen=True, tag_field="kind", tag="bursts"):
    """Several times the same new prompt within a moment, then another one. `arrivals` are those of
    bursts, not of requests."""

    size: int = 32
    within_s: float = 0.05
    prompt_tokens: Length = 4000
    output_tokens: Length = 200

    def __post_init__(self) -> None:
        require_positive(self, "size")
        require_length(self, "prompt_tokens")
        require_length(self, "output_tokens")
        if self.within_s < 0:
            raise ValueError(f"within_s must be at least 0 seconds, not {self.within_s}")

    def build(self, name: str, seed: int) -> Workload:
        return OpenLoop(self._requests(name, Random(f"{name}-{seed}")))

    def _requests(self, name: str, random: Random) -> Iterator[SimRequest]:
        pending: list[tuple[float, int, SimRequest]] = []
        for number, start_s in enumerate(self.arrivals.times(random)):
            while pending and pending[0][0] <= start_s:
                yield heapq.heappop(pending)[2]
            prompt = PromptSpec(None, f"{name}/p{number}", draw(self.prompt_tokens, random))
            for copy in range(self.size):
                request = SimRequest(
                    start_s + random.uniform(0.0, self.within_s),
                    prompt,
                    draw(self.output_tokens, random),
                    session=f"{name}/s{number}.{copy}",
                    group=f"{name}/p{number}",
                    priority=self.priority,
                    tenant=self.tenant,
                )
                heapq.heappush(pending, (request.arrival_s, number * self.size + copy, request))


class OpenLoop:
    """A workload whose requests wait for nobody."""

    def __init__(self, requests: Iterator[SimRequest]) -> None:
        self._requests = requests

    def start(self) -> Iterator[SimRequest]:
        return self._requests

    def on_finish(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return None


class Mixed:
    """Several workloads at once. A finished request's next turn comes from its own workload."""

    def __init__(self, parts: list[Workload]) -> None:
        self._parts = parts
        self._owner: dict[str, Workload] = {}
        """Of each session that may go on."""

    def start(self) -> Iterator[SimRequest]:
        streams = [self._owned(part) for part in self._parts]
        return heapq.merge(*streams, key=lambda request: request.arrival_s)

    def on_finish(self, request: SimRequest, now_s: float) -> SimRequest | None:
        owner = self._owner.pop(request.session)
        following = owner.on_finish(request, now_s)
        if following is not None:
            self._owner[following.session] = owner
        return following

    def _owned(self, part: Workload) -> Iterator[SimRequest]:
        for request in part.start():
            self._owner[request.session] = part
            yield request


def draw(length: Length, random: Random) -> int:
    return length if isinstance(length, int) else random.randint(*length)


def require_positive(description: msgspec.Struct, *names: str) -> None:
    for name in names:
        value = getattr(description, name)
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def require_length(description: msgspec.Struct, name: str) -> None:
    """Raises ValueError unless the field is a positive length or a pair of them in order."""
    value: Length = getattr(description, name)
    low, high = (value, value) if isinstance(value, int) else value
    if not 1 <= low <= high:
        raise ValueError(f"{name} must be at least 1 token, the lower bound first, not {value}")
