"""The samples: each loads through the specs and is accepted as it stands by a real API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvoy_cluster.api_server import ApiServer
from kvoy_operator.kinds import kind_of
from kvoy_operator.manifests import render_support, render_workload
from kvoy_operator.render_testing import make_options
from kvoy_operator.resources import parse_router, parse_service

Json = dict[str, Any]

SAMPLES = sorted((Path(__file__).parents[2] / "deploy" / "samples").glob("*.yaml"))
PARSERS: dict[str, Any] = {"LLMService": parse_service, "LLMRouter": parse_router}


@pytest.fixture(params=SAMPLES, ids=lambda path: path.stem)
def sample(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_a_sample_can_be_read(sample: Path) -> None:
    bodies = [body for body in yaml.safe_load_all(sample.read_text()) if body["kind"] in PARSERS]

    read = [PARSERS[body["kind"]](as_stored(body)) for body in bodies]

    assert read


def test_a_sample_says_what_it_is_for(sample: Path) -> None:
    assert sample.read_text().startswith("# ")


def test_together_they_show_what_there_is() -> None:
    services = [
        parse_service(as_stored(body)).spec
        for path in SAMPLES
        for body in yaml.safe_load_all(path.read_text())
        if body["kind"] == "LLMService"
    ]

    assert {spec.model.uri.partition(":")[0] for spec in services} >= {"hf", "pvc"}
    assert any(spec.prefill for spec in services)
    assert any(spec.nodes > 1 for spec in services)
    assert any(spec.router.ref for spec in services)
    assert any(spec.model.token_secret_ref for spec in services)
    assert any(spec.engine.pod_template for spec in services)
    assert any(spec.router.api_keys_secret_ref for spec in services)
    assert any(spec.router.tls_secret_ref for spec in services)


def test_the_plain_one_has_six_lines() -> None:
    lines = SAMPLES[0].read_text().splitlines()

    assert len([line for line in lines if not line.startswith("#")]) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
def test_a_sample_is_accepted(api_server: ApiServer, sample: Path) -> None:
    namespace = api_server.create_namespace()

    applied = api_server.kubectl("apply", "-n", namespace, "-f", str(sample))

    bodies = list(yaml.safe_load_all(sample.read_text()))
    assert applied.count("created") == len(bodies)


@pytest.mark.slow
@pytest.mark.usefixtures("kvoy_crds")
def test_a_sample_can_be_applied_again_by_the_server(api_server: ApiServer, sample: Path) -> None:
    """As Argo CD and Flux do, again and again: nothing changes after the first time."""
    namespace = api_server.create_namespace()

    for _ in range(2):
        api_server.kubectl("apply", "--server-side", "-n", namespace, "-f", str(sample))

    assert_stored_once(api_server, namespace)


@pytest.mark.slow
def test_what_a_sample_becomes_is_accepted(api_server: ApiServer, sample: Path) -> None:
    """Everything that the operator makes of it, but groups: this layer knows no LeaderWorkerSet."""
    namespace = api_server.create_namespace()
    services = [
        parse_service(as_stored(body, namespace))
        for body in yaml.safe_load_all(sample.read_text())
        if body["kind"] == "LLMService"
    ]
    options = make_options()

    manifests = [
        manifest
        for service in services
        for manifest in (
            *render_support(service, options),
            *(render_workload(service, pool, "abc123", options) for pool in service.spec.pools),
        )
        if manifest["kind"] not in ("LeaderWorkerSet", "LLMRoleScaler")
    ]

    for manifest in manifests:
        path = kind_of(manifest["kind"]).path(namespace)
        api_server.api.request("POST", f"{path}?dryRun=All&fieldValidation=Strict", manifest)
    assert manifests


def assert_stored_once(server: ApiServer, namespace: str) -> None:
    """A second apply of the same text changed nothing."""
    path = f"/apis/kvoy.dev/v1alpha1/namespaces/{namespace}/llmservices"
    services = server.api.get(path)["items"]
    assert services
    assert {service["metadata"]["generation"] for service in services} == {1}


def as_stored(body: Json, namespace: str = "default") -> Json:
    metadata = {**body["metadata"], "namespace": namespace, "uid": "u", "generation": 1}
    return {**body, "metadata": metadata}
