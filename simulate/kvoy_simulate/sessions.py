"""Conversations: each turn's prompt is everything said before and something new.

One description covers chats with think time, agents (a long history, small turns, tools that answer
at once) and code generation (a repository as the beginning): they differ in sizes alone. A turn is
asked when the one before it has its answer and a pause is over, so a slow fleet is asked less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import msgspec

from kvoy_simulate.arrivals import Arrivals
from kvoy_simulate.traffic import PromptSpec, SimRequest, Workload
from kvoy_simulate.workloads import Description, Length, draw, require_length, require_positive


class Sessions(Description, frozen=True, tag_field="kind", tag="sessions"):
    """Either `users` who each begin a new session when one has ended, or sessions that begin by
    themselves (`arrivals`)."""

    users: int | None = None
    arrivals: Arrivals | None = None
    """Of sessions, not of requests."""
    start_within_s: float = 10.0
    """`users` begin at even chance within so many seconds."""
    applications: int = 1
    """Distinct beginnings that sessions share."""
    shared_tokens: int = 0
    """Of an application's beginning; 0: sessions share nothing."""
    start_tokens: Length = 500
    """What the session itself begins with, the first question included."""
    turn_tokens: Length = 100
    """What each further turn adds beside the answer before it."""
    output_tokens: Length = 200
    turns: Length = 8
    pause_s: float = 10.0
    """Mean of the exponentially distributed time between an answer and the next turn."""
    max_prompt_tokens: int = 120_000
    """A session whose next prompt would be longer ends."""

    def __post_init__(self) -> None:
        if (self.users is None) == (self.arrivals is None):
            raise ValueError("give one of users and arrivals")
        if self.users is not None:
            require_positive(self, "users")
        require_positive(self, "applications", "max_prompt_tokens")
        for name in ("start_tokens", "turn_tokens", "output_tokens", "turns"):
            require_length(self, name)
        for name in ("start_within_s", "shared_tokens", "pause_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")

    def at_rate(self, rate: float) -> Sessions:
        """Another rate of sessions; where there are users, so many of them. Raises ValueError for
        less than one user."""
        if self.arrivals is not None:
            return msgspec.structs.replace(self, arrivals=self.arrivals.at_rate(rate))
        return msgspec.structs.replace(self, users=round(rate))

    def build(self, name: str, seed: int) -> Workload:
        return _Running(self, name, seed)


@dataclass(slots=True)
class _Session:
    random: Random
    """Of its own: what it says does not depend on when others are answered, so two policies see the
    same sessions."""
    turns_left: int
    number: int
    turn: int = 0


class _Running:
    def __init__(self, description: Sessions, name: str, seed: int) -> None:
        self._description = description
        self._name = name
        self._seed = seed
        self._num_begun = 0
        self._live: dict[str, _Session] = {}
        self._beginnings = [
            PromptSpec(None, f"{name}/a{number}", description.shared_tokens)
            for number in range(description.applications if description.shared_tokens else 0)
        ]

    def start(self) -> Iterator[SimRequest]:
        random = Random(f"{self._name}-{self._seed}-starts")
        description = self._description
        if description.arrivals is not None:
            for arrival_s in description.arrivals.times(random):
                yield self._begin(arrival_s)
        elif description.users is not None:
            latest_s = description.start_within_s
            starts = (random.uniform(0.0, latest_s) for _ in range(description.users))
            for arrival_s in sorted(starts):
                yield self._begin(arrival_s)

    def on_finish(self, request: SimRequest, now_s: float) -> SimRequest | None:
        session = self._live[request.session]
        if session.turns_left:
            pause_s = self._pause_s(session)
            following = self._next_turn(request, session, now_s + pause_s)
            if following is not None:
                return following
        del self._live[request.session]
        if self._description.users is None:
            return None
        return self._begin(now_s + self._pause_s(session))

    def _begin(self, arrival_s: float) -> SimRequest:
        number = self._num_begun
        self._num_begun += 1
        name = f"{self._name}/s{number}"
        random = Random(f"{name}-{self._seed}")
        description = self._description
        session = _Session(random, draw(description.turns, random) - 1, number)
        self._live[name] = session
        parent = random.choice(self._beginnings) if self._beginnings else None
        start_tokens = draw(description.start_tokens, random)
        return self._request(arrival_s, PromptSpec(parent, name, start_tokens), name, session)

    def _next_turn(
        self, last: SimRequest, session: _Session, arrival_s: float
    ) -> SimRequest | None:
        session.turns_left -= 1
        session.turn += 1
        tokens = draw(self._description.turn_tokens, session.random)
        prompt = last.prompt_and_answer().then(f"t{session.turn}", tokens)
        if prompt.num_tokens > self._description.max_prompt_tokens:
            return None
        return self._request(arrival_s, prompt, last.session, session)

    def _request(
        self, arrival_s: float, prompt: PromptSpec, name: str, session: _Session
    ) -> SimRequest:
        return SimRequest(
            arrival_s,
            prompt,
            draw(self._description.output_tokens, session.random),
            session=name,
            group=name,
            priority=self._description.priority,
            tenant=self._description.tenant,
            answer=f"a{session.turn}",
        )

    def _pause_s(self, session: _Session) -> float:
        mean_s = self._description.pause_s
        return session.random.expovariate(1.0 / mean_s) if mean_s else 0.0
