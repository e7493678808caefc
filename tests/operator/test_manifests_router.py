"""A router's children, alike for a service's own router and for a shared one."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from kvoy_contract.fleet import parse_fleet
from kvoy_operator.errors import InvalidSpec
from kvoy_operator.identity import Manifest
from kvoy_operator.manifests import is_behind, render_shared_router, render_support
from kvoy_operator.options import RenderOptions, service_secret
from kvoy_operator.render_testing import make_options, make_router, make_service, service_body

Spec = dict[str, Any]


def _own(spec: Spec | None = None, options: RenderOptions | None = None) -> list[Manifest]:
    return render_support(make_service(spec), options or make_options())


def _one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def _pod(manifests: list[Manifest], owner: str = "qwen") -> Manifest:
    deployment = _one(manifests, "Deployment", f"{owner}-router")
    pod: Manifest = deployment["spec"]["template"]["spec"]
    return pod


def _container(manifests: list[Manifest], owner: str = "qwen") -> Manifest:
    return next(c for c in _pod(manifests, owner)["containers"] if c["name"] == "router")


def _decode(secret: Manifest, key: str) -> str:
    return base64.b64decode(secret["data"][key]).decode()


def test_the_command_names_ports_fleet_and_configuration() -> None:
    router = _container(_own())

    assert router["command"] == ["kvoy", "router"]
    assert router["args"] == [
        "--host=0.0.0.0",
        "--port=8000",
        "--admin-port=8001",
        "--kubernetes",
        "--fleet-file=/etc/kvoy/fleet/fleet.yaml",
        "--config=/etc/kvoy/fleet/router.yaml",
        "--drain-timeout-s=600",
        "--log-format=json",
    ]


def test_clients_reach_the_api_and_not_the_admin_port_through_the_service() -> None:
    service = _one(_own(), "Service", "qwen")["spec"]
    ports = {port["name"]: port["containerPort"] for port in _container(_own())["ports"]}

    (port,) = service["ports"]
    assert (port["port"], ports[port["targetPort"]]) == (80, 8000)
    assert service["selector"] == {
        "kvoy.dev/service": "qwen",
        "kvoy.dev/component": "router",
    }


def test_probes_ask_the_admin_port() -> None:
    router = _container(_own())

    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert router[probe]["httpGet"]["port"] == "admin"
    assert router["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_a_router_is_replaced_before_it_goes_and_has_time_to_drain() -> None:
    manifests = _own(options=make_options(router_drain_timeout_s=100))
    deployment = _one(manifests, "Deployment", "qwen-router")["spec"]
    pre_stop_s = _container(manifests)["lifecycle"]["preStop"]["sleep"]["seconds"]

    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert "--drain-timeout-s=100" in _container(manifests)["args"]
    assert _pod(manifests)["terminationGracePeriodSeconds"] > 100 + pre_stop_s


def test_a_drain_of_nodes_is_never_blocked() -> None:
    budget = _one(_own(), "PodDisruptionBudget", "qwen-router")["spec"]

    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_router_starts_only_as_often_as_the_spec_says() -> None:
    deployment = _one(_own({"router": {"replicas": 5}}), "Deployment", "qwen-router")

    assert deployment["spec"]["replicas"] == 5


def test_resources_are_the_operator_s_where_the_spec_says_nothing() -> None:
    options = make_options(router_cpu="1", router_memory="2Gi")
    spec = {"router": {"resources": {"limits": {"memory": "1Gi"}}}}

    assert _container(_own(options=options))["resources"] == {
        "requests": {"cpu": "1", "memory": "2Gi"}
    }
    # A request above the limit would be refused: the API server takes the limit for it.
    assert _container(_own(spec, options))["resources"] == {
        "requests": {"cpu": "1"},
        "limits": {"memory": "1Gi"},
    }


def test_the_fleet_names_the_service_and_its_secret() -> None:
    manifests = _own({"model": {"uri": "hf://a/b", "name": "org/b:latest"}})
    (member,) = parse_fleet(_decode(_one(manifests, "Secret", "qwen-fleet"), "fleet.yaml")).services

    assert (member.name, member.uid, member.model) == ("qwen", "uid-of-qwen", "org/b:latest")
    assert member.secret == _decode(_one(manifests, "Secret", "qwen-internal"), "secret")


def test_a_service_s_secret_is_its_own_and_stays() -> None:
    options = make_options()
    names = [("default", "qwen"), ("default", "other"), ("team-a", "qwen")]

    secrets = [service_secret(options, namespace, name) for namespace, name in names]

    assert len(set(secrets)) == 3
    assert secrets[0] == service_secret(make_options(), "default", "qwen")
    # Engines that run hold it: another version of the operator must derive the very same.
    assert secrets[0] == "ea27e44726e27e5a43ba5ea6ec674a7de7ab2b0ab8463b57b2f9831e7035ca9c"


def test_a_short_master_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="master_secret"):
        make_options(master_secret=b"short")


def test_a_change_of_the_fleet_rolls_no_router() -> None:
    router = make_router()
    one, two = make_service(name="one"), make_service(name="two")

    before = render_shared_router(router, [one], make_options())
    after = render_shared_router(router, [one, two], make_options())

    assert _pod(before, "shared") == _pod(after, "shared")
    assert _one(before, "Secret", "shared-fleet") != _one(after, "Secret", "shared-fleet")


def test_a_change_of_limits_rolls_no_router() -> None:
    before = _own()
    after = _own({"router": {"policy": "least-load", "flowControl": {"maxWaiting": 5}}})

    assert _pod(before) == _pod(after)
    text = _decode(_one(after, "Secret", "qwen-fleet"), "router.yaml")
    assert text == 'max-waiting: 5\npolicy: "least-load"\n'


def test_a_longer_request_gets_a_longer_drain_and_a_shorter_one_no_shorter_one() -> None:
    own = _pod(_own())["terminationGracePeriodSeconds"]
    longer = _own({"router": {"timeouts": {"request": "20m"}}})
    shorter = _own({"router": {"timeouts": {"request": "1m"}}})

    assert "--drain-timeout-s=1200" in _container(longer)["args"]
    assert _pod(longer)["terminationGracePeriodSeconds"] == own + 600
    assert _pod(shorter) == _pod(_own())


def test_keys_and_certificate_are_mounted_from_users_secrets_and_followed_there() -> None:
    spec = {
        "router": {
            "apiKeysSecretRef": {"name": "team-keys", "key": "all.yaml"},
            "tlsSecretRef": {"name": "cert"},
        }
    }
    pod, router = _pod(_own(spec)), _container(_own(spec))
    volumes = {each["name"]: each.get("secret") for each in pod["volumes"]}
    mounts = {each["name"]: each for each in router["volumeMounts"]}

    assert volumes["api-keys"] == {
        "secretName": "team-keys",
        "items": [{"key": "all.yaml", "path": "keys.yaml"}],
        "defaultMode": 0o440,
    }
    assert volumes["tls"]["secretName"] == "cert"
    assert [each["key"] for each in volumes["tls"]["items"]] == ["tls.crt", "tls.key"]
    # By a folder: a single file (subPath) would never be brought up to date.
    assert mounts["api-keys"] == {
        "name": "api-keys",
        "mountPath": "/etc/kvoy/api-keys",
        "readOnly": True,
    }
    assert "--keys-file=/etc/kvoy/api-keys/keys.yaml" in router["args"]
    assert "--tls-certificate=/etc/kvoy/tls/tls.crt" in router["args"]


def test_an_endpoint_with_a_certificate_is_https_alone() -> None:
    spec = {"tlsSecretRef": {"name": "cert"}}
    own = _one(_own({"router": spec}), "Service", "qwen")["spec"]["ports"]
    shared = render_shared_router(make_router(spec), [], make_options())

    assert own == _one(shared, "Service", "shared")["spec"]["ports"]
    assert [(port["port"], port["appProtocol"]) for port in own] == [(443, "https")]


def test_a_service_of_a_shared_router_has_none_of_its_own() -> None:
    kinds = {m["kind"] for m in _own({"router": {"ref": "shared"}})}

    assert kinds == {"Secret", "NetworkPolicy", "Service"}
    services = [m for m in _own({"router": {"ref": "shared"}}) if m["kind"] == "Service"]
    assert [m["metadata"]["name"] for m in services] == ["qwen-engines"]


def test_a_shared_router_has_what_a_service_s_own_has() -> None:
    shared = render_shared_router(make_router(name="qwen"), [make_service()], make_options())
    own = {
        (m["kind"], m["metadata"]["name"])
        for m in _own()
        if m["metadata"]["labels"].get("kvoy.dev/component") == "router"
    }

    assert {(m["kind"], m["metadata"]["name"]) for m in shared} == own


def test_weights_are_those_of_the_router_and_else_a_hundred() -> None:
    router = make_router({"weights": [{"service": "two", "weight": 0}]})
    services = [make_service(name="two"), make_service(name="one")]
    secret = _one(render_shared_router(router, services, make_options()), "Secret", "shared-fleet")

    members = parse_fleet(_decode(secret, "fleet.yaml")).services

    assert [(m.name, m.weight) for m in members] == [("one", 100), ("two", 0)]


def test_the_order_of_services_makes_no_other_document() -> None:
    one, two = make_service(name="one"), make_service(name="two")
    rendered = [
        render_shared_router(make_router(), services, make_options())
        for services in ([one, two], [two, one])
    ]

    assert rendered[0] == rendered[1]


@pytest.mark.parametrize(
    ("selector", "spec", "labels", "expected"),
    [
        (None, {}, {}, True),
        ({"matchLabels": {"team": "search"}}, {}, {"team": "search"}, True),
        ({"matchLabels": {"team": "search"}}, {}, {"team": "ads"}, False),
        ({"matchLabels": {"team": "search"}}, {"router": {"ref": "shared"}}, {}, True),
        ({"matchLabels": {"team": "search"}}, {"router": {"ref": "other"}}, {}, False),
    ],
)
def test_a_router_serves_what_it_selects_and_what_refers_to_it(
    selector: Spec | None, spec: Spec, labels: dict[str, str], expected: bool
) -> None:
    router = make_router({"selector": selector} if selector else {})

    assert is_behind(router, service_body(spec, labels=labels)) == expected


def test_pull_secrets_reach_the_router_and_its_account() -> None:
    manifests = _own(
        {"imagePullSecrets": [{"name": "own"}]}, make_options(image_pull_secrets=("mirror",))
    )
    expected = [{"name": "mirror"}, {"name": "own"}]

    assert _pod(manifests)["imagePullSecrets"] == expected
    account = _one(manifests, "ServiceAccount", "qwen-router")
    assert account["imagePullSecrets"] == expected


def test_a_patch_of_the_router_is_merged_and_a_wrong_one_reported_by_its_field() -> None:
    good = {"router": {"podTemplate": {"spec": {"priorityClassName": "high"}}}}
    wrong = {"podTemplate": {"spec": {"containers": [{"name": "router", "args": []}]}}}

    assert _pod(_own(good))["priorityClassName"] == "high"
    with pytest.raises(InvalidSpec) as own:
        _own({"router": wrong})
    with pytest.raises(InvalidSpec) as shared:
        render_shared_router(make_router(wrong), [], make_options())
    assert own.value.field.startswith("spec.router.podTemplate.spec.containers")
    assert shared.value.field.startswith("spec.podTemplate.spec.containers")


def test_labels_of_the_resource_reach_the_router_s_pods() -> None:
    service = make_service(labels={"team": "search"})
    deployment = _one(render_support(service, make_options()), "Deployment", "qwen-router")

    assert deployment["spec"]["template"]["metadata"]["labels"]["team"] == "search"
    assert "team" not in deployment["spec"]["selector"]["matchLabels"]
