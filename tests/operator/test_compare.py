from __future__ import annotations

import copy
from typing import Any

import pytest

from kvoy_operator.compare import DIGEST_ANNOTATION, is_applied, stamped

DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "d", "namespace": "n", "labels": {"a": "1"}},
    "spec": {
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "engine",
                        "args": ["serve", "model"],
                        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                        "ports": [{"containerPort": 8100}],
                        "resources": {"limits": {"cpu": 1, "memory": "8Gi", "nvidia.com/gpu": 2}},
                    }
                ],
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
            }
        }
    },
}


def _live() -> dict[str, Any]:
    """With what an API server and others add."""
    live = copy.deepcopy(DEPLOYMENT)
    live["metadata"] |= {"uid": "u", "annotations": {"someone": "else"}}
    pod = live["spec"]["template"]["spec"]
    pod["containers"].insert(0, {"name": "sidecar", "image": "x"})
    engine = pod["containers"][1]
    engine["env"].reverse()
    engine["ports"][0]["protocol"] = "TCP"
    engine["resources"]["limits"] = {"cpu": "1", "memory": "8192Mi", "nvidia.com/gpu": "2"}
    engine["terminationMessagePath"] = "/dev/termination-log"
    pod["volumes"][0]["emptyDir"]["sizeLimit"] = "1024Mi"
    return live


def test_defaults_and_what_others_own_do_not_matter() -> None:
    assert is_applied(DEPLOYMENT, _live())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("containers", 1, "args"), ["serve", "model", "--more"]),
        (("containers", 1, "args"), ["model", "serve"]),
        (("containers", 1, "env"), [{"name": "A", "value": "1"}]),
        (("containers", 1, "resources", "limits", "nvidia.com/gpu"), "1"),
        (("containers", 1, "resources", "limits", "memory"), "8G"),
        (("tolerations",), []),
        (("tolerations", 0, "operator"), "Equal"),
        (("volumes", 0, "emptyDir", "sizeLimit"), "2Gi"),
        (("volumes", 0), {"name": "shm", "hostPath": {"path": "/dev/shm"}}),
    ],
)
def test_a_live_object_that_differs_is_seen(path: tuple[Any, ...], value: Any) -> None:
    live = _live()
    place = live["spec"]["template"]["spec"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value

    assert not is_applied(DEPLOYMENT, live)


def test_an_empty_map_is_absent_only_where_it_means_nothing() -> None:
    without: dict[str, Any] = {"metadata": {}, "volume": {"name": "v"}}

    assert is_applied({"metadata": {"labels": {}, "annotations": {}}}, without)
    assert not is_applied({"volume": {"emptyDir": {}}}, without)


def test_a_secret_is_compared_by_the_data_that_the_server_keeps() -> None:
    desired = {"kind": "Secret", "stringData": {"key": "value"}}

    assert is_applied(desired, {"kind": "Secret", "data": {"key": "dmFsdWU="}})
    assert not is_applied(desired, {"kind": "Secret", "data": {"key": "b3RoZXI="}})


def test_ports_of_one_number_and_two_protocols_are_two() -> None:
    desired = {"spec": {"ports": [{"port": 53, "protocol": "UDP", "targetPort": 53}]}}
    live = {
        "spec": {
            "ports": [
                {"port": 53, "protocol": "TCP", "targetPort": 1},
                {"port": 53, "protocol": "UDP", "targetPort": 53},
            ]
        }
    }

    assert is_applied(desired, live)
    live["spec"]["ports"].pop()
    assert not is_applied(desired, live)


def test_a_field_that_is_no_longer_wanted_changes_the_digest() -> None:
    before = stamped(DEPLOYMENT)
    fewer = copy.deepcopy(DEPLOYMENT)
    del fewer["spec"]["template"]["spec"]["tolerations"]

    after = stamped(fewer)

    assert not is_applied(after, before)
    assert is_applied(fewer, before)
    assert stamped(copy.deepcopy(DEPLOYMENT)) == before
    assert before["metadata"]["annotations"][DIGEST_ANNOTATION]


def test_stamping_changes_neither_the_manifest_nor_its_other_annotations() -> None:
    manifest = {"metadata": {"annotations": {"a": "1"}}}

    assert stamped(manifest)["metadata"]["annotations"]["a"] == "1"
    assert manifest == {"metadata": {"annotations": {"a": "1"}}}
