"""Every alert fires when it should and not before, as promtool evaluates it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from kvoy_monitoring.__main__ import rule_groups
from kvoy_monitoring.rules import ALERTS

pytestmark = pytest.mark.slow

ROUTER = 'namespace="n", pod="router-0"'
POOL = 'namespace="n", service="qwen", pool="serving"'
ENGINE = 'namespace="n", llmservice="qwen", pod="qwen-0"'


@dataclass(frozen=True, slots=True)
class Story:
    """Series, one sample a minute, that make one alert fire after `fires_at` and not before."""

    alert: str
    series: dict[str, str]
    quiet_at: str
    fires_at: str


CACHED_ERROR = 'kvoy_router_cached_tokens_error_ratio_bucket{namespace="n", model="m"'
TTFT_RATIO = 'kvoy_router_time_to_first_token_prediction_ratio_bucket{namespace="n", model="m"'

STORIES = (
    Story(
        "KvoyErrorRatioHigh",
        {
            'kvoy_router_requests_total{namespace="n", model="m", status="200"}': "0+60x60",
            'kvoy_router_requests_total{namespace="n", model="m", status="503"}': "0x10 0+30x50",
        },
        "10m",
        "25m",
    ),
    Story(
        "KvoyRouterHasNoEngine",
        {
            f"kvoy_router_requests_in_flight{{{ROUTER}}}": "0x60",
            f'kvoy_router_engine_state{{{ROUTER}, engine="a", state="exact"}}': "1x10 0x50",
        },
        "10m",
        "15m",
    ),
    Story(
        "KvoyRouterFileRefused",
        {
            f"kvoy_router_config_ok{{{ROUTER}}}": "1x10 0x50",
            f"kvoy_router_keys_file_ok{{{ROUTER}}}": "1x60",
        },
        "11m",
        "15m",
    ),
    Story(
        "KvoyStreamsNotResumed",
        {
            f'kvoy_router_resumes_total{{{ROUTER}, model="m", outcome="resumed"}}': "0+60x60",
            f'kvoy_router_resumes_total{{{ROUTER}, model="m", outcome="budget"}}': (
                "0+3x20 60+30x40"
            ),
        },
        "20m",
        "35m",
    ),
    Story(
        "KvoyEngineAvoided",
        {
            f'kvoy_router_engine_breaker{{{ROUTER}, engine="a", state="closed"}}': "1x10 0x50",
            'kvoy_router_engine_breaker{namespace="n", pod="router-1", engine="a", '
            'state="closed"}': "1x20 0x40",
        },
        "24m",
        "28m",
    ),
    Story(
        "KvoyAttemptBudgetSpent",
        {f'kvoy_router_budget_refusals_total{{{ROUTER}, kind="retry"}}': "0x10 1+1x50"},
        "10m",
        "14m",
    ),
    Story(
        "KvoyResumeMemoryFull",
        {
            f"kvoy_router_resume_bytes{{{ROUTER}}}": "80x10 95x50",
            f"kvoy_router_resume_bytes_limit{{{ROUTER}}}": "100x60",
        },
        "12m",
        "18m",
    ),
    Story(
        "KvoyRequestsTurnedAway",
        {
            f'kvoy_router_requests_total{{{ROUTER}, model="m", outcome="ok"}}': "0+60x60",
            f'kvoy_router_requests_total{{{ROUTER}, model="m", outcome="queue_full"}}': (
                "0x20 0+12x40"
            ),
            # A key's own limit is no lack of room.
            f'kvoy_router_requests_total{{{ROUTER}, model="m", outcome="rate_limit_exceeded"}}': (
                "0+30x60"
            ),
        },
        "20m",
        "35m",
    ),
    Story(
        "KvoyTelemetryLost",
        {f'kvoy_router_engine_state{{{ROUTER}, engine="a", state="lost"}}': "0x10 1x50"},
        "11m",
        "15m",
    ),
    Story(
        "KvoyCachePredictionsDrift",
        {
            # From the 40th minute on every second request finds less than was expected.
            f'{CACHED_ERROR}, le="-0.2"}}': "0x40 0+30x80",
            f'{CACHED_ERROR}, le="0.2"}}': "0+60x120",
            f'{CACHED_ERROR}, le="+Inf"}}': "0+60x120",
        },
        "45m",
        "90m",
    ),
    Story(
        "KvoyFirstTokenPredictionsDrift",
        {
            # From the 40th minute on first tokens take four times as long as expected.
            f'{TTFT_RATIO}, le="1.0"}}': "0+60x40 2400x80",
            f'{TTFT_RATIO}, le="3.0"}}': "0+60x40 2400x80",
            f'{TTFT_RATIO}, le="5.0"}}': "0+60x120",
            f'{TTFT_RATIO}, le="+Inf"}}': "0+60x120",
        },
        "45m",
        "90m",
    ),
    Story(
        "KvoyQueueGrows",
        {
            f"kvoy_engine_waiting_sequences{{{ENGINE}}}": "20x10 100x50",
            f"kvoy_engine_running_sequences{{{ENGINE}}}": "32x60",
        },
        "12m",
        "20m",
    ),
    Story(
        "KvoyKvCacheFull",
        {f"kvoy_engine_kv_usage_ratio{{{ENGINE}}}": "0.9x10 0.97x50"},
        "15m",
        "25m",
    ),
    Story(
        "KvoyEngineStuck",
        {f"kvoy_engine_last_step_age_seconds{{{ENGINE}}}": "0x10 10+60x50"},
        "11m",
        "15m",
    ),
    Story(
        "KvoyEngineNotReady",
        {f"kvoy_engine_ready{{{ENGINE}}}": "1x10 0x80"},
        "35m",
        "45m",
    ),
    Story(
        "KvoyNumbersCorrupted",
        {f"kvoy_engine_corrupted_requests_total{{{ENGINE}}}": "0x10 1x50"},
        "9m",
        "12m",
    ),
    Story(
        "KvoyPrefixPredictionDrifts",
        {
            f'kvoy_router_predicted_cached_tokens_total{{{ROUTER}, model="m"}}': "0+60000x120",
            f'kvoy_router_cached_tokens_total{{{ROUTER}, model="m"}}': "0+57000x30 1710000+6000x90",
        },
        "30m",
        "100m",
    ),
    Story(
        "KvoyOperatorHasNoLeader",
        {'kvoy_operator_leader{namespace="kvoy", pod="a"}': "1x10 0x50"},
        "11m",
        "16m",
    ),
    Story(
        "KvoyReconcilesFail",
        {
            'kvoy_operator_reconcile_total{kind="LLMService", result="retry"}': "0x10 0+30x50",
            'kvoy_operator_reconcile_total{kind="LLMService", result="ok"}': "0+10x60",
        },
        "10m",
        "40m",
    ),
    Story(
        "KvoyOperatorQueueIsLate",
        {"kvoy_operator_queue_oldest_age_seconds{}": "0x10 100+60x50"},
        "11m",
        "30m",
    ),
    Story(
        "KvoyWatchIsStale",
        {'kvoy_operator_last_event_age_seconds{kind="pods"}': "5x10 0+60x50"},
        "25m",
        "40m",
    ),
    Story(
        "KvoyPoolIncomplete",
        {
            f"kvoy_operator_pool_replicas_desired{{{POOL}}}": "3x60",
            f"kvoy_operator_pool_replicas_ready{{{POOL}}}": "3x10 2x50",
        },
        "20m",
        "30m",
    ),
)


def test_every_alert_has_a_story() -> None:
    assert {story.alert for story in STORIES} == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.alert)
def test_an_alert_fires_when_it_should_and_not_before(story: Story, tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.fail("no promtool here: tools/system-packages.sh installs it")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule_groups()))
    alert = next(alert for alert in ALERTS if alert.name == story.alert)
    query = f'ALERTS{{alertname="{story.alert}", alertstate="firing"}}'
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in story.series.items()],
                "promql_expr_test": [
                    {
                        "expr": f"count({query}) or vector(0)",
                        "eval_time": time,
                        "exp_samples": [{"labels": "{}", "value": value}],
                    }
                    for time, value in ((story.quiet_at, 0), (story.fires_at, 1))
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))

    done = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert alert.severity in ("critical", "warning")
    assert alert.summary
    assert alert.action
