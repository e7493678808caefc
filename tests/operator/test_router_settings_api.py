"""What a spec says about its router reaches it, on a real API server: limits by the mounted file,
Secrets and TLS by a rollout."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvoy_cluster.api_server import ApiServer
from kvoy_operated import Site

pytestmark = pytest.mark.slow

_SECRETS = {"apiKeysSecretRef": {"name": "keys"}, "tlsSecretRef": {"name": "certificate"}}


@pytest.fixture
def site(api_server: ApiServer, kvoy_crds: None, tmp_path: Path) -> Iterator[Site]:
    site = Site(api_server, tmp_path)
    site.start_operator('--router-defaults={"timeouts":{"connect":"3s"}}')
    site.start_kubelet()
    yield site
    site.close()


def _apply(site: Site, **router: Any) -> None:
    site.apply("qwen", router={"replicas": 1, **router})
    site.wait_for_condition("qwen", "Ready", "True", "AllReady")


def _file(site: Site) -> dict[str, Any]:
    encoded = site.get("Secret", "qwen-fleet")["data"]["router.yaml"]
    content: dict[str, Any] = yaml.safe_load(base64.b64decode(encoded))
    return content


def _router(site: Site) -> dict[str, Any]:
    return site.get("Deployment", "qwen-router")


def _pod(site: Site) -> dict[str, Any]:
    spec: dict[str, Any] = _router(site)["spec"]["template"]["spec"]
    return spec


def _ports(site: Site) -> list[tuple[int, str]]:
    ports = site.get("Service", "qwen")["spec"]["ports"]
    return [(port["port"], port["appProtocol"]) for port in ports]


def test_changed_limits_reach_the_mounted_file_and_roll_nothing(site: Site) -> None:
    _apply(site, flowControl={"maxWaiting": 5})
    before = _router(site)
    assert _file(site) == {"policy": "kv-aware", "connect-timeout-s": 3.0, "max-waiting": 5}

    _apply(site, policy="least-load", flowControl={"maxHold": "2m"})

    wanted = {"policy": "least-load", "connect-timeout-s": 3.0, "max-held-s": 120.0}
    site.wait_until(lambda: _file(site) == wanted, "the file is as the spec says")
    assert _router(site)["metadata"]["generation"] == before["metadata"]["generation"]


def test_secrets_come_and_go_with_the_fields_that_name_them(site: Site) -> None:
    _apply(site)
    plain = _pod(site)
    url = f"qwen.{site.namespace}.svc/v1"
    assert (_ports(site), site.get("LLMService", "qwen")["status"]["url"]) == (
        [(80, "http")],
        f"http://{url}",
    )

    _apply(site, **_SECRETS)

    site.wait_until(lambda: _ports(site) == [(443, "https")], "the endpoint is https alone")
    assert site.get("LLMService", "qwen")["status"]["url"] == f"https://{url}"
    assert {"api-keys", "tls"} <= {volume["name"] for volume in _pod(site)["volumes"]}

    _apply(site)

    site.wait_until(lambda: _ports(site) == [(80, "http")], "the endpoint is http again")
    assert _pod(site) == plain
