"""What the router says about its own predictions, and about what it saves."""

import math

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvoy_router.audit import Audit, ModelAudit, cached_error
from kvoy_router.audit_metrics import AuditMetrics
from kvoy_router.decision import Decision
from kvoy_router.fleet_testing import IDLE, MODEL, STRIDE, Fleet, prompt_hashes
from kvoy_router.metrics import Metrics
from kvoy_router.record import RequestRecord

PROMPT = prompt_hashes(640, "a")


def pick(fleet: Fleet) -> Decision:
    return fleet.pool.pick(fleet.request(PROMPT), fleet.now_s)


def only_model(audit: Audit) -> ModelAudit:
    ((name, of_model),) = audit.models()
    assert name == MODEL
    return of_model


def counts(buckets: object) -> dict[float, int]:
    return {bound: count for bound, count in buckets if count}  # type: ignore[attr-defined]


def test_what_an_engine_holds_beyond_a_stride_more_or_less_is_an_error() -> None:
    fleet = Fleet(1)
    fleet.sync("e0", PROMPT[:5])
    decision = pick(fleet)
    assert decision.cached_tokens == 5 * STRIDE

    errors = [cached_error(decision, tokens) for tokens in (0, 256, 320, 384, 640)]
    assert errors == [-0.5, 0.0, 0.0, 0.0, 0.5]


def test_the_predicted_time_is_the_queue_and_the_prompt_at_the_engines_own_rate() -> None:
    fleet = Fleet(1)
    fleet.report("e0", queued_prefill_tokens=10_000, waiting=1, running=1)

    predicted_s = pick(fleet).predicted_ttft_s
    assert predicted_s is not None
    assert predicted_s == pytest.approx((10_000 + 640) / 10_000 + 0.02, rel=0.05)


def test_nothing_is_predicted_of_an_engine_whose_load_is_not_known() -> None:
    fleet = Fleet(0)
    fleet.add("e0", load=None)
    audit = Audit()
    decision = pick(fleet)
    audit.on_answer(decision, None, 1.0)

    assert decision.predicted_ttft_s is None
    assert counts(only_model(audit).ttft_ratio.cumulative()) == {}


def test_a_late_first_token_is_seen_as_a_ratio_and_milliseconds_are_not() -> None:
    fleet = Fleet(1)
    audit = Audit()
    decision = pick(fleet)
    predicted_s = decision.predicted_ttft_s
    assert predicted_s is not None
    for observed_s in (predicted_s + 0.004, 4.0 * predicted_s + 0.15):
        audit.on_answer(decision, decision.cached_tokens, observed_s)

    assert counts(only_model(audit).ttft_ratio.cumulative()) == {
        1.25: 1, 1.5: 1, 2.0: 1, 3.0: 1, 5.0: 2, 10.0: 2, math.inf: 2,
    }  # fmt: skip


def test_what_is_saved_is_what_the_engine_next_in_turn_would_have_computed_beyond() -> None:
    fleet = Fleet(4)
    fleet.sync("e2", PROMPT)
    audit = Audit()
    for _ in range(8):
        decision = pick(fleet)
        audit.on_answer(decision, None, None)
        decision.lease.release(fleet.now_s)

    # Three of four turns would have gone to an engine without the prompt.
    assert only_model(audit).saved_tokens == 6 * 640
    assert only_model(audit).added_tokens == 0


def test_work_that_round_robin_would_have_spared_is_counted_apart() -> None:
    fleet = Fleet(2)
    fleet.sync("e0", PROMPT)
    fleet.report("e0", running=250, waiting=50, queued_prefill_tokens=500_000)
    audit = Audit()
    for _ in range(2):
        decision = pick(fleet)
        assert decision.endpoint.id == "e1"
        fleet.store("e1", ())
        audit.on_answer(decision, None, None)
        decision.lease.release(fleet.now_s)

    assert only_model(audit).added_tokens == 640
    assert only_model(audit).saved_tokens == 0


def test_engines_that_cannot_serve_lose_their_turn() -> None:
    fleet = Fleet(3)
    fleet.sync("e1", PROMPT)
    fleet.report("e0", IDLE, ready=False)
    fleet.pool.set_draining("e2", True)

    assert [pick(fleet).cached_tokens_in_turn for _ in range(4)] == [640] * 4


def test_a_request_that_was_answered_is_compared_and_one_that_moved_mid_stream_is_not() -> None:
    fleet = Fleet(1)
    fleet.sync("e0", PROMPT)
    metrics = Metrics()
    for num_resumes in (0, 1):
        record = RequestRecord("r", "/v1/completions", fleet.now_s, model=MODEL, is_stream=True)
        record.decision = pick(fleet)
        record.cached_tokens, record.num_resumes = 640, num_resumes
        record.first_byte_s = fleet.now_s + 0.1
        metrics.on_request(record, fleet.now_s + 1.0)

    text = metrics.expose().decode()
    assert 'kvoy_router_cached_tokens_error_ratio_bucket{le="0.05",model="model"} 1.0' in text
    ratio = "kvoy_router_time_to_first_token_prediction_ratio"
    assert f'{ratio}_bucket{{le="+Inf",model="model"}} 1.0' in text
    assert 'kvoy_router_prefill_tokens_saved_total{model="model"} 0.0' in text

    metrics.forget_model(MODEL)
    assert ratio + "_bucket{" not in metrics.expose().decode()


def test_the_series_add_up() -> None:
    fleet = Fleet(1)
    audit = Audit()
    registry = CollectorRegistry()
    registry.register(AuditMetrics(audit))
    decision = pick(fleet)
    for cached in (0, 640):
        audit.on_answer(decision, cached, 1.0)

    lines = generate_latest(registry).decode().splitlines()
    error = [line.split()[-1] for line in lines if "cached_tokens_error_ratio_bucket" in line]
    assert error == ["0.0", "0.0", "0.0", "1.0", "1.0", "1.0", "2.0", "2.0"]
