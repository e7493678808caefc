"""Small fleets under random failures: one seed, one story, and what must hold whatever happens.

A storm is cheap (tens of milliseconds), so thousands of them are run:

    python -m kvoy_simulate.storm --seeds 1000 --first 0
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Iterator
from random import Random

from kvoy_engine.core_config import CoreConfig
from kvoy_engine.timing_model import TimingModel
from kvoy_router.flow_ticket import FlowLimits
from kvoy_simulate.fleet import Fleet
from kvoy_simulate.outcome import Outcome, Status
from kvoy_simulate.runs import event_end_s
from kvoy_simulate.scenario import (
    EngineDies,
    EngineGroup,
    EngineHangs,
    EngineSlows,
    Event,
    RouterRestarts,
    ScaleDown,
    ScaleUp,
    Scenario,
    TelemetryLost,
    Ways,
)
from kvoy_simulate.traffic import PromptSpec, SimRequest

POLICIES = ("kv-aware", "kv-aware", "least-load", "round-robin", "random")
DURATION_S = 10.0
MEAN_CHECK_S = 1.5
"""Between two looks at all invariants, at random: over many storms every moment has its look."""
_JUST_AFTER_S = 1e-6
AFTERMATH_S = 30.0
"""No event lasts longer after its storm; by then nothing may be left of any request."""


class Chatter:
    """Conversations about a few documents, some of one turn; and now and then a prompt that no
    engine can hold."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._turns_left: dict[str, int] = {}

    def start(self) -> Iterator[SimRequest]:
        random, at_s = self._random, 0.0
        for number in range(random.randint(8, 40)):
            at_s += random.expovariate(4.0)
            document = PromptSpec(None, f"document-{random.randrange(4)}", random.choice((16, 200)))
            length = 4000 if random.random() < 0.03 else random.randint(1, 120)
            session = f"session-{number}"
            self._turns_left[session] = random.choice((0, 0, 1, 3))
            yield self._request(at_s, document.then(session, length), session)

    def on_finish(self, request: SimRequest, now_s: float) -> SimRequest | None:
        if not self._turns_left[request.session]:
            return None
        self._turns_left[request.session] -= 1
        prompt = request.prompt_and_answer().then("next", self._random.randint(1, 40))
        return self._request(now_s + self._random.random(), prompt, request.session)

    def _request(self, at_s: float, prompt: PromptSpec, session: str) -> SimRequest:
        output = self._random.choice((1, 2, self._random.randint(3, 60)))
        return SimRequest(
            at_s,
            prompt,
            output,
            session,
            priority=self._random.choice((0, 0, 1)),
            tenant=self._random.choice("abb"),
            answer=f"{session}/{prompt.num_tokens}",
        )


def make(seed: int) -> tuple[Scenario, str]:
    """The scenario of a seed, and its policy."""
    random = Random(f"storm/{seed}")
    groups = tuple(_group(random, f"kind{i}") for i in range(random.choice((1, 1, 2))))
    routers = random.choice((1, 1, 2, 3))
    events = tuple(_event(random, groups, routers) for _ in range(random.randint(1, 6)))
    scenario = Scenario(
        engines=groups,
        workload=lambda seed: Chatter(Random(f"chatter/{seed}")),
        duration_s=DURATION_S,
        routers=routers,
        ways=Ways(telemetry_s=random.choice((0.001, 0.05))),
        events=events,
        max_retries=random.choice((0, 2, 2)),
        max_resumes=random.choice((0, 2, 2)),
        flow=random.choice((None, FlowLimits(max_waiting=5, max_waiting_s=4.0), FlowLimits())),
    )
    return scenario, random.choice(POLICIES)


def weather(seed: int) -> Outcome:
    """Run the storm of a seed. Raises AssertionError when something that must hold does not."""
    scenario, policy = make(seed)
    fleet = Fleet(scenario, policy, seed)
    random = Random(f"looks/{seed}")

    def look() -> None:
        fleet.check_integrity()
        fleet.clock.after(random.expovariate(1 / MEAN_CHECK_S), look)

    look()
    for event in scenario.events:
        fleet.clock.at(event.at_s + _JUST_AFTER_S, fleet.check_integrity)
    fleet.run()
    fleet.clock.run(max(map(event_end_s, scenario.events)))
    fleet.settle(AFTERMATH_S)
    outcome = fleet.outcome()
    check(outcome)
    return outcome


def check(outcome: Outcome) -> None:
    """Every request has ended, once, and what was said adds up."""
    columns = outcome.requests
    for row, status in enumerate(columns.status):
        assert status != Status.UNFINISHED, f"request {row} has not ended"
        assert columns.end_s[row] >= columns.arrival_s[row]
        has_begun = columns.first_token_s[row] == columns.first_token_s[row]
        assert has_begun == (columns.output_tokens[row] > 0)
        assert status != Status.OK or has_begun
        assert columns.cached_tokens[row] < columns.prompt_tokens[row]
    generated = sum(engine.generated_tokens[-1] for engine in outcome.engines if engine.times_s)
    assert generated <= outcome.counters["generated_tokens"]
    assert sum(columns.output_tokens) <= outcome.counters["generated_tokens"]


def _group(random: Random, name: str) -> EngineGroup:
    return EngineGroup(
        name=name,
        count=random.randint(1, 3),
        core=CoreConfig(
            num_blocks=random.choice((24, 60, 200)),
            max_model_len=1024,
            max_num_seqs=random.choice((2, 8)),
            max_num_batched_tokens=random.choice((32, 256)),
            max_waiting=random.choice((2, 1000)),
        ),
        step=TimingModel(base_s=0.05, prefill_tokens_per_s=2_000.0),
        speed=random.choice((1.0, 1.0, 0.5)),
    )


def _event(random: Random, groups: tuple[EngineGroup, ...], routers: int) -> Event:
    at_s = random.uniform(0.0, DURATION_S)
    for_s = random.uniform(0.1, 8.0)
    group = random.choice(groups)
    engine = f"{group.name}-{random.randrange(group.count)}"
    events: list[Event] = [
        EngineDies(at_s=at_s, engine=engine, restart_after_s=random.choice((None, 0.0, for_s))),
        EngineDies(at_s=at_s, engine=engine, restart_after_s=for_s),
        EngineHangs(at_s=at_s, engine=engine, for_s=for_s),
        EngineSlows(at_s=at_s, engine=engine, factor=random.choice((0.5, 3.0, 30.0)), for_s=for_s),
        TelemetryLost(at_s=at_s, for_s=for_s, engines=random.choice(((), (engine,)))),
        RouterRestarts(
            at_s=at_s,
            router=random.randrange(routers),
            grace_s=for_s,
            is_killed=random.random() < 0.5,
            down_s=for_s / 4,
        ),
        ScaleUp(at_s=at_s, group=group.name, count=random.randint(1, 2), load_s=for_s / 2),
        ScaleDown(at_s=at_s, group=group.name, count=1, grace_s=for_s),
    ]
    return random.choice(events)


def brew(seeds: Iterable[int]) -> dict[Status, int]:
    """Run these storms; requests by how they ended. Raises AssertionError naming the seed."""
    ends = dict.fromkeys(Status, 0)
    for seed in seeds:
        try:
            outcome = weather(seed)
        except Exception as error:
            raise AssertionError(f"storm {seed}: {error!r}") from error
        for status in outcome.requests.status:
            ends[Status(status)] += 1
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("kvoy_router").setLevel(logging.ERROR)  # hanging engines are what it is about
    ends = brew(range(options.first, options.first + options.seeds))
    print(", ".join(f"{number} {status.name.lower()}" for status, number in ends.items()))


if __name__ == "__main__":
    main()
