"""The first layer of the test cluster: real objects, real controllers, no root, no trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.waiting import wait_for

pytestmark = pytest.mark.slow

_CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: owners.test.kvoy.dev}
spec:
  group: test.kvoy.dev
  scope: Namespaced
  names: {plural: owners, singular: owner, kind: Owner}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
"""

_DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: localhost/none:1}]}
"""


def test_controllers_make_pods_of_a_deployment(api_server: ApiServer) -> None:
    namespace = api_server.create_namespace()

    api_server.kubectl("apply", "-n", namespace, "-f", "-", input=_DEPLOYMENT)

    path = f"/api/v1/namespaces/{namespace}/pods"
    pods = wait_for(lambda: _items(api_server, path, at_least=2), "two pods")
    assert [pod["spec"]["containers"][0]["image"] for pod in pods] == ["localhost/none:1"] * 2


def test_a_child_goes_with_its_custom_owner(api_server: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "crd.yaml").write_text(_CRD)
    api_server.apply_crds([tmp_path / "crd.yaml"])
    namespace = api_server.create_namespace()
    owners = f"/apis/test.kvoy.dev/v1/namespaces/{namespace}/owners"
    children = f"/api/v1/namespaces/{namespace}/configmaps"

    owner = api_server.api.request(
        "POST",
        owners,
        {"apiVersion": "test.kvoy.dev/v1", "kind": "Owner", "metadata": {"name": "owner"}},
    )
    reference = {
        "apiVersion": "test.kvoy.dev/v1",
        "kind": "Owner",
        "name": "owner",
        "uid": owner["metadata"]["uid"],
    }
    metadata = {"name": "child", "ownerReferences": [reference]}
    api_server.api.request("POST", children, {"metadata": metadata})
    api_server.api.request("DELETE", f"{owners}/owner")

    wait_for(lambda: not api_server.api.exists(f"{children}/child"), "the child's removal", 30)


def test_kubectl_knows_the_short_name_of_a_new_resource_at_once(
    api_server: ApiServer, tmp_path: Path
) -> None:
    api_server.kubectl("get", "namespaces")  # now it holds a list of all that there is
    names = "{plural: lodgers, singular: lodger, kind: Lodger, shortNames: [ldg]}"
    crd = _CRD.replace("owners.test", "lodgers.test").replace(
        "{plural: owners, singular: owner, kind: Owner}", names
    )
    (tmp_path / "crd.yaml").write_text(crd)
    api_server.apply_crds([tmp_path / "crd.yaml"])

    assert "Lodger" in api_server.kubectl("explain", "ldg")


def test_a_killed_api_server_comes_back_with_its_objects(api_server: ApiServer) -> None:
    namespace = api_server.create_namespace()

    api_server.processes.stop("kube-apiserver")
    with pytest.raises(ConnectionRefusedError):
        api_server.api.get("/readyz")
    api_server.processes.restart("kube-apiserver")

    wait_for(lambda: api_server.api.get("/readyz") == "ok", "the API server's return")
    assert api_server.api.exists(f"/api/v1/namespaces/{namespace}")


def test_two_api_servers_run_side_by_side_and_leave_nothing(api_server: ApiServer) -> None:
    second = ApiServer()
    try:
        second.kubectl("create", "configmap", "mine", "-n", "default")
        mine = "/api/v1/namespaces/default/configmaps/mine"
        assert second.api.exists(mine)
        assert not api_server.api.exists(mine)
        pids = [second.processes.pid(name) for name in second.processes.running()]
    finally:
        second.stop()

    assert len(pids) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not second.folder.exists()


def _items(
    server: ApiServer, path: str, at_least: int
) -> list[dict[str, dict[str, list[dict[str, str]]]]]:
    items: list[dict[str, dict[str, list[dict[str, str]]]]] = server.api.get(path)["items"]
    return items if len(items) >= at_least else []
