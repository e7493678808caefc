"""One tenant asks ten times its share, in virtual time: what does it cost the others?"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from kvoy_engine.core_config import CoreConfig
from kvoy_engine.timing_model import TimingModel
from kvoy_router.flow_ticket import FlowLimits
from kvoy_simulate.fleet import run
from kvoy_simulate.fleet_testing import Script
from kvoy_simulate.outcome import Status
from kvoy_simulate.scenario import EngineGroup, Scenario
from kvoy_simulate.traffic import PromptSpec, SimRequest

SHARE_PER_S = 2.0
"""Of each of five tenants; together three quarters of what two engines serve."""
WARMUP_S, DURATION_S = 5.0, 20.0
ENGINES = EngineGroup(
    name="engine",
    count=2,
    core=CoreConfig(
        num_blocks=4000, max_model_len=4096, max_num_batched_tokens=2048, max_num_seqs=64
    ),
    step=TimingModel(base_s=0.02, prefill_tokens_per_s=10_000.0, context_token_s=0.0),
)


def requests_of(tenant: str, per_s: float, seed: int) -> list[SimRequest]:
    """Prompts of their own, of 400 to 1,200 tokens, at random times."""
    random = Random(f"{seed}/{tenant}")
    requests: list[SimRequest] = []
    now_s = random.expovariate(per_s)
    while now_s < DURATION_S:
        name = f"{tenant}/{len(requests)}"
        prompt = PromptSpec(None, name, random.randint(400, 1200))
        requests.append(SimRequest(now_s, prompt, random.randint(15, 45), name, tenant=tenant))
        now_s += random.expovariate(per_s)
    return requests


def ttft_p90_s(rates: Mapping[str, float], flow: FlowLimits | None) -> float:
    """Of all tenants but the greedy one."""

    def workload(seed: int) -> Script:
        requests = [r for tenant, rate in rates.items() for r in requests_of(tenant, rate, seed)]
        return Script(sorted(requests, key=lambda request: request.arrival_s))

    scenario = Scenario(
        engines=(ENGINES,), workload=workload, duration_s=DURATION_S, flow=flow, drain_s=200.0
    )
    outcome = run(scenario, policy="kv-aware", seed=1)
    columns = outcome.requests
    assert set(columns.status) == {Status.OK}
    waits = sorted(
        columns.first_token_s[row] - columns.arrival_s[row]
        for row in range(len(columns))
        if columns.arrival_s[row] >= WARMUP_S and outcome.names[columns.tenant[row]] != "greedy"
    )
    return waits[int(0.9 * len(waits))]


@pytest.mark.slow
def test_a_greedy_tenant_costs_the_others_at_most_a_tenth_of_their_ttft() -> None:
    modest = {f"tenant-{number}": SHARE_PER_S for number in range(4)}
    greedy = modest | {"greedy": 10 * SHARE_PER_S}

    fair_s = ttft_p90_s(modest | {"greedy": SHARE_PER_S}, FlowLimits())

    assert ttft_p90_s(greedy, FlowLimits()) <= 1.1 * fair_s
    assert ttft_p90_s(greedy, None) > 5 * fair_s, "without flow control it costs them dearly"
