"""Names stay within Kubernetes' limits whatever is made of them; labels belong to who sets them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvoy_contract.names import POOL_LABEL, PREFILL_POOL, SERVING_POOL
from kvoy_operator import identity
from kvoy_operator.manifests import render_support, render_workload
from kvoy_operator.render_testing import (
    LONGEST_NAME,
    make_options,
    make_router,
    make_service,
)
from kvoy_operator.resources import MAX_NAME_LENGTH
from kvoy_operator.revision import revision_of
from kvoy_operator.spec_pool import MAX_NODES, MAX_REPLICAS

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_MAX = 63
# What controllers append: ReplicaSet and StatefulSet revisions are up to ten characters of a hash.
_HASH = "-" + "f" * 10


def _workload() -> str:
    service = make_service(name=LONGEST_NAME)
    return identity.workload_name(service.name, SERVING_POOL, revision_of(service))


def test_the_longest_name_of_the_tests_is_the_longest_that_is_allowed() -> None:
    assert len(LONGEST_NAME) == MAX_NAME_LENGTH


@pytest.mark.parametrize(
    "name",
    [
        identity.workload_name(LONGEST_NAME, SERVING_POOL, "bcdfg"),
        identity.workload_name(LONGEST_NAME, PREFILL_POOL, "bcdfg"),
        identity.engines_name(LONGEST_NAME),
        identity.router_name(LONGEST_NAME),
        identity.api_service_name(LONGEST_NAME),
        identity.internal_secret_name(LONGEST_NAME),
        identity.fleet_secret_name(LONGEST_NAME),
        identity.cache_claim_name(LONGEST_NAME),
        identity.fetch_job_name(LONGEST_NAME, "abcdef"),
        identity.prefill_scaler_name(LONGEST_NAME),
    ],
)
def test_every_child_has_a_name_that_dns_takes(name: str) -> None:
    assert _DNS_LABEL.fullmatch(name)


def test_what_a_deployment_makes_of_its_name_fits_a_label() -> None:
    replica_set = _workload() + _HASH

    assert len(replica_set) <= _MAX
    # The API server cuts a generated pod name's beginning to 58 characters and adds five.
    assert len(replica_set[:58] + "fffff") <= _MAX


def test_what_a_leader_worker_set_makes_of_its_name_fits_a_label() -> None:
    leader = f"{_workload()}-{MAX_REPLICAS - 1}"
    worker = f"{leader}-{MAX_NODES - 1}"
    longest = [
        leader,  # also the workers' StatefulSet, and the label of a pod's name
        worker,
        leader + _HASH,  # label controller-revision-hash of the workers
        _workload() + _HASH,  # the same of the leaders
    ]

    assert max(map(len, longest)) <= _MAX


def test_pools_and_revisions_have_workloads_of_their_own() -> None:
    names = {
        identity.workload_name("qwen", pool, revision)
        for pool in (SERVING_POOL, PREFILL_POOL)
        for revision in ("bcdfg", "bcdfh")
    }

    assert len(names) == 4


def test_the_url_is_that_of_the_service_in_its_namespace() -> None:
    url = identity.endpoint_url("qwen", "team-a", is_tls=False)
    encrypted = identity.endpoint_url("qwen", "team-a", is_tls=True)

    assert (url, encrypted) == ("http://qwen.team-a.svc/v1", "https://qwen.team-a.svc/v1")


def test_a_child_goes_with_its_owner() -> None:
    service = make_service(uid="12-34")

    made = identity.child(service, "v1", "Secret", "qwen-internal", {})

    assert made["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "kvoy.dev/v1alpha1",
            "kind": "LLMService",
            "name": "qwen",
            "uid": "12-34",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        ({"team": "search", "kueue.x-k8s.io/queue-name": "gpus"}, True),
        ({"app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/name": "mine"}, False),
        ({"kvoy.dev/component": "router", "kvoy.dev/revision": "stolen"}, False),
        ({"pod-template-hash": "1", "leaderworkerset.sigs.k8s.io/name": "x"}, False),
    ],
)
def test_labels_of_the_resource_reach_its_children_but_never_replace_ours(
    labels: dict[str, str], kept: bool
) -> None:
    service = make_service(labels=labels)

    made = identity.child_labels(service, "engine", SERVING_POOL, "bcdfg")

    assert (labels.items() <= made.items()) == kept
    assert identity.child_labels(make_service(), "engine", SERVING_POOL, "bcdfg").items() <= (
        made.items()
    )


def test_selectors_use_nothing_that_a_user_sets() -> None:
    service = make_service(labels={"team": "search"})

    assert "team" not in identity.engine_selector("qwen", SERVING_POOL, "bcdfg")
    assert "team" not in identity.router_selector(service)


def test_a_shared_router_and_a_service_of_one_name_have_pods_of_their_own() -> None:
    service, router = make_service(name="same"), make_router(name="same")

    assert identity.router_selector(service) != identity.router_selector(router)


@pytest.mark.parametrize(
    "model",
    [
        {"uri": "hf://acme-labs/Tiny.Chat-3B"},
        {"uri": "hf://org/x@main"},
        {"uri": "file:///mnt/models/a b"},
        {"uri": "pvc://models/folder/" + "x" * 120},
        {"uri": "hf://org/x", "name": "org/x:latest"},
        {"uri": "hf://org/x", "name": "n" * 120},
        {"uri": "hf://org/x", "name": "n" * 62 + "-" + "m"},
    ],
)
def test_a_model_s_name_reaches_no_label_and_no_name_but_an_annotation_and_the_arguments(
    model: dict[str, Any],
) -> None:
    service = make_service({"model": model})
    workload = render_workload(service, SERVING_POOL, "bcdfg", make_options())
    template = workload["spec"]["template"]
    container = template["spec"]["containers"][0]

    for manifest in [workload, template, *render_support(service, make_options())]:
        for key, value in manifest["metadata"]["labels"].items():
            assert _LABEL_VALUE.fullmatch(value), key
        if "name" in manifest["metadata"]:
            assert _DNS_LABEL.fullmatch(manifest["metadata"]["name"])
    name = model.get("name", "qwen")
    assert template["metadata"]["annotations"]["kvoy.dev/model"] == name
    assert template["metadata"]["annotations"]["kvoy.dev/model-uri"] == model["uri"]
    assert f"--served-model-name={name}" in container["args"]
    assert workload["spec"]["selector"]["matchLabels"][POOL_LABEL] == SERVING_POOL
