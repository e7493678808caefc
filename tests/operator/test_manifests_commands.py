"""Engines and routers of this version read what the operator writes into their pods."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvoy_cli.model import FetchConfig
from kvoy_contract.names import PREFILL_POOL, SERVING_POOL
from kvoy_contract.settings import read_settings
from kvoy_engine.config import EngineConfig
from kvoy_operator.durations import Duration
from kvoy_operator.identity import Manifest
from kvoy_operator.manifests import render_support, render_workload
from kvoy_operator.options import RenderOptions
from kvoy_operator.render_testing import make_options, make_service
from kvoy_operator.resources import parse_router_defaults
from kvoy_operator.spec_fields import SpecModel
from kvoy_operator.spec_router import Failover, FlowControl, Timeouts
from kvoy_router.config import RouterConfig
from kvoy_router.config_file import FIXED
from kvoy_router.flow_ticket import FlowLimits

Spec = dict[str, Any]
_HUB = "hf://Qwen/Qwen3-0.6B"
_SIM = {"engine": {"kind": "sim"}}


def _container(manifest: Manifest) -> Manifest:
    spec = manifest["spec"]
    template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
    container: Manifest = template["spec"]["containers"][0]
    return container


def _read_engine(spec: Spec, pool: str = SERVING_POOL) -> EngineConfig:
    workload = render_workload(make_service(spec), pool, "bcdfg", make_options())
    arguments = _container(workload)["args"]
    return read_settings(EngineConfig, "kvoy serve", "", arguments)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"gpus": 1, "engine": {"maxModelLen": 4096, "kvCacheFraction": 0.8}},
        {"model": {"uri": _HUB, "cache": {"hostPath": {"path": "/var/m"}}}},
        {"model": {"uri": _HUB, "cache": {"pvc": {"size": "9Gi"}}}},
        {"model": {"uri": "file:///models/a b", "name": "org/a:b"}},
        {"engine": {"args": ["--max-num-seqs", "8", "--block-size=32"]}},
        {**_SIM, "gpus": 4},
    ],
)
def test_an_engine_reads_its_command(spec: Spec) -> None:
    config = _read_engine(spec)

    assert config.host == "0.0.0.0"
    assert (config.port, config.telemetry_port) == (8100, 9100)
    assert config.expect_router
    assert config.role == "both"
    assert config.served_model_name == (spec.get("model", {}).get("name", "qwen"),)
    assert config.is_sim == ("kind" in spec.get("engine", {}))


@pytest.mark.parametrize(("pool", "role"), [(SERVING_POOL, "decode"), (PREFILL_POOL, "prefill")])
def test_an_engine_learns_its_role(pool: str, role: str) -> None:
    assert _read_engine({**_SIM, "prefill": {}}, pool).role == role


def test_an_engine_of_a_group_finds_its_place_in_what_is_injected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As `kvoy serve` takes them over from a LeaderWorkerSet.
    monkeypatch.setenv("KVOY_NNODES", "2")
    monkeypatch.setenv("KVOY_NODE_RANK", "1")
    monkeypatch.setenv("KVOY_MASTER_ADDR", "qwen-s-bcdfg-0.qwen-s-bcdfg.default")

    config = _read_engine({**_SIM, "nodes": 2, "gpus": 8})

    assert config.is_worker
    assert config.master_port == 9200
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (8, 2)


def _read_router(spec: Spec, folder: Path, options: RenderOptions | None = None) -> RouterConfig:
    """With the configuration file that the operator mounts."""
    manifests = render_support(make_service({"router": spec}), options or make_options())
    (deployment,) = [each for each in manifests if each["kind"] == "Deployment"]
    (text,) = [
        base64.b64decode(each["data"]["router.yaml"]).decode()
        for each in manifests
        if each["metadata"]["name"] == "qwen-fleet"
    ]
    file = folder / "router.yaml"
    file.write_text(text)
    arguments = _container(deployment)["args"]
    assert "--config=/etc/kvoy/fleet/router.yaml" in arguments
    here = [f"--config={file}" if each.startswith("--config") else each for each in arguments]
    # What it says may change while a router runs.
    assert not FIXED & {key.replace("-", "_") for key in yaml.safe_load(text)}
    return read_settings(RouterConfig, "kvoy router", "", here)


def test_a_router_reads_its_command(tmp_path: Path) -> None:
    config = _read_router({"policy": "least-load"}, tmp_path)

    assert config.kubernetes
    assert (config.host, config.port, config.admin_port) == ("0.0.0.0", 8000, 8001)
    assert config.policy == "least-load"
    assert config.fleet_file == "/etc/kvoy/fleet/fleet.yaml"
    assert config.drain_timeout_s == 600
    assert (config.keys_file, config.tls_certificate, config.tls_key) == (None, None, None)


def test_a_router_reads_every_limit_of_its_spec(tmp_path: Path) -> None:
    spec: Spec = {
        "flowControl": {
            "maxWaiting": 2000,
            "maxWaitingPerTenant": 500,
            "maxWaitingPerPriority": 1000,
            "maxWait": "1m30s",
            "maxEngineWait": "500ms",
            "sharedWait": 0.25,
            "ageAfter": "0s",
            "agedShare": 0.2,
            "maxHeld": 10,
            "maxHold": "2m",
            "objectives": {"interactive": -5, "a=b": 5},
        },
        "failover": {
            "maxRetries": 1,
            "maxResumes": 0,
            "hangTimeout": "10s",
            "retryShare": 1,
            "retryBurst": 0,
            "breakerFailures": 5,
            "breakerPause": "2s",
            "hedge": "Observed",
            "hedgeAfter": "1500ms",
        },
        "timeouts": {
            "request": "20m",
            "connect": "500ms",
            "firstByte": "10m",
            "wholeAnswer": "25m",
            "idle": "90s",
        },
        "apiKeysSecretRef": {"name": "keys"},
        "tlsSecretRef": {"name": "certificate"},
    }
    # One that is left out here would be one that nobody has tried.
    for part, model in (
        ("flowControl", FlowControl),
        ("failover", Failover),
        ("timeouts", Timeouts),
    ):
        assert spec[part].keys() == {field.alias for field in model.model_fields.values()}

    config = _read_router(spec, tmp_path)

    assert config.flow_limits == FlowLimits(
        max_engine_wait_s=0.5,
        shared_wait=0.25,
        max_waiting=2000,
        max_waiting_per_tenant=500,
        max_waiting_per_priority=1000,
        max_waiting_s=90.0,
        age_s=0.0,
        aged_share=0.2,
        max_held=10,
        max_held_s=120.0,
    )
    assert config.objectives == {"interactive": -5, "a=b": 5}
    assert (config.max_retries, config.max_resumes, config.hang_timeout_s) == (1, 0, 10.0)
    assert (config.retry_share, config.retry_burst) == (1.0, 0)
    assert (config.breaker_failures, config.breaker_pause_s) == (5, 2.0)
    assert (config.hedge, config.hedge_after_s) == ("observed", 1.5)
    assert config.request_timeout_s == 1200.0
    assert config.client_limits.connect_s == 0.5
    assert config.client_limits.first_byte_s == 600.0
    assert config.client_limits.whole_answer_s == 1500.0
    assert config.client_limits.idle_s == 90.0
    assert config.drain_timeout_s == 1200.0
    assert config.keys_file == "/etc/kvoy/api-keys/keys.yaml"
    assert config.tls_certificate == "/etc/kvoy/tls/tls.crt"
    assert config.tls_key == "/etc/kvoy/tls/tls.key"


@pytest.mark.parametrize(
    ("wanted", "mode"), [("None", "off"), ("Observed", "observed"), ("Fixed", "fixed")]
)
def test_a_router_hedges_as_its_spec_says(tmp_path: Path, wanted: str, mode: str) -> None:
    assert _read_router({"failover": {"hedge": wanted}}, tmp_path).hedge == mode
    assert _read_router({}, tmp_path).hedge == "off"


def test_the_operators_defaults_hold_where_a_spec_says_nothing(tmp_path: Path) -> None:
    defaults = parse_router_defaults(
        {"flowControl": {"maxWaiting": 7, "maxHeld": 8}, "timeouts": {"request": "30m"}}
    )

    config = _read_router(
        {"flowControl": {"maxHeld": 0}}, tmp_path, make_options(router_defaults=defaults)
    )

    assert (config.max_waiting, config.max_held) == (7, 0)
    assert (config.request_timeout_s, config.drain_timeout_s) == (1800.0, 1800.0)


def test_the_limits_that_the_reference_states_are_the_routers_own() -> None:
    """A default stands in a description, so that it may change: then the text must."""
    own = RouterConfig(engine=("127.0.0.1:1",))
    stated: dict[type[SpecModel], dict[str, float]] = {
        FlowControl: {
            "maxWaiting": own.max_waiting,
            "maxWaitingPerTenant": own.max_waiting_per_tenant,
            "maxWaitingPerPriority": own.max_waiting_per_priority,
            "maxWait": own.max_waiting_s,
            "maxEngineWait": own.max_engine_wait_s,
            "sharedWait": own.shared_wait,
            "ageAfter": own.age_s,
            "agedShare": own.aged_share,
            "maxHeld": own.max_held,
            "maxHold": own.max_held_s,
        },
        Failover: {
            "maxRetries": own.max_retries,
            "maxResumes": own.max_resumes,
            "hangTimeout": own.hang_timeout_s,
            "retryShare": own.retry_share,
            "retryBurst": own.retry_burst,
            "breakerFailures": own.breaker_failures,
            "breakerPause": own.breaker_pause_s,
            "hedgeAfter": own.hedge_after_s,
        },
        Timeouts: {
            "request": own.request_timeout_s,
            "connect": own.connect_timeout_s,
            "firstByte": own.first_byte_timeout_s,
            "wholeAnswer": own.whole_answer_timeout_s,
            "idle": own.idle_timeout_s,
        },
    }
    for model, defaults in stated.items():
        for field in model.model_fields.values():
            if field.alias in ("objectives", "hedge"):
                continue
            said = str(field.description).rpartition("Default: ")[2].rstrip(".")
            value = Duration(said).seconds if said[-1] in "sm" else float(said)
            assert value == defaults[str(field.alias)], field.alias


def test_a_fetch_job_is_told_what_to_bring_and_where() -> None:
    service = make_service({"model": {"uri": f"{_HUB}@v1", "cache": {"pvc": {"size": "9Gi"}}}})
    (job,) = [
        manifest
        for manifest in render_support(service, make_options())
        if manifest["kind"] == "Job"
    ]

    config = read_settings(FetchConfig, "kvoy model fetch", "", _container(job)["args"])

    assert (config.uri, config.revision) == (f"{_HUB}@v1", None)
    assert config.to.startswith("/models/Qwen-Qwen3-0.6B-v1-")
