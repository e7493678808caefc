"""Engines and routers of this version read what the operator writes into their pods."""

from __future__ import annotations

from typing import Any

import pytest

from kvoy_cli.model import FetchConfig
from kvoy_contract.names import PREFILL_POOL, SERVING_POOL
from kvoy_contract.settings import read_settings
from kvoy_engine.config import EngineConfig
from kvoy_operator.identity import Manifest
from kvoy_operator.manifests import render_support, render_workload
from kvoy_operator.render_testing import make_options, make_service
from kvoy_router.config import RouterConfig

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


def test_a_router_reads_its_command() -> None:
    service = make_service({"router": {"policy": "least-load"}})
    (deployment,) = [
        manifest
        for manifest in render_support(service, make_options())
        if manifest["kind"] == "Deployment"
    ]

    config = read_settings(RouterConfig, "kvoy router", "", _container(deployment)["args"])

    assert config.kubernetes
    assert (config.host, config.port, config.admin_port) == ("0.0.0.0", 8000, 8001)
    assert config.policy == "least-load"
    assert config.fleet_file == "/etc/kvoy/fleet/fleet.yaml"
    assert config.drain_timeout_s == 600


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
