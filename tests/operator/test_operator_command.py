"""`kvoy operator`'s flags, and that its rights name what it calls and nothing by wildcard."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvoy_contract.settings import read_settings
from kvoy_operator.config import OperatorConfig
from kvoy_operator.kinds import OPTIONAL, WATCHED
from kvoy_operator.rbac import Rule, own_rules, router_rules, service_rules


def _read(*argv: str) -> OperatorConfig:
    return read_settings(OperatorConfig, "kvoy operator", "", list(argv))


def test_flags_become_options_of_rendering() -> None:
    config = _read(
        "--namespace=a",
        "--namespace=b",
        "--router-image=r:1",
        "--engine-cuda-image=c:1",
        "--image-pull-secret=one",
        "--image-pull-secret=two",
        "--router-role-kind=Role",
        "--no-network-policies",
    )

    options = config.render_options(b"x" * 32)

    assert config.namespace == ("a", "b")
    assert (options.router_image, options.engine_cuda_image) == ("r:1", "c:1")
    assert options.image_pull_secrets == ("one", "two")
    assert options.router_role_kind == "Role"
    assert not options.has_network_policies


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--workers=0", "workers"),
        ("--resync-s=1", "resync-s"),
        ("--port=70000", "port"),
        ("--image-pull-policy=Sometimes", "image-pull-policy"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _read(flag)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def _all_rules() -> Sequence[Rule]:
    return [
        *service_rules("ClusterRole", "kvoy-router"),
        *own_rules("lease", "master"),
        *router_rules(),
    ]


def test_no_right_is_a_wildcard() -> None:
    for rule in _all_rules():
        assert "*" not in (rule.group, *rule.resources, *rule.verbs, *rule.names)
        assert rule.verbs
        assert rule.resources


def test_whatever_is_watched_may_be_watched_and_secrets_may_not_be_read() -> None:
    granted = {
        (rule.group, resource, verb)
        for rule in service_rules("ClusterRole", "kvoy-router")
        for resource in rule.resources
        for verb in rule.verbs
    }

    for kind in (*WATCHED, *OPTIONAL):
        for verb in ("get", "list", "watch"):
            assert (kind.group, kind.plural, verb) in granted
    secrets = {verb for _, resource, verb in granted if resource == "secrets"}
    assert secrets == {"create", "patch", "delete"}


def test_only_the_routers_role_may_be_bound() -> None:
    binding = [rule for rule in service_rules("Role", "kvoy-router") if "bind" in rule.verbs]

    assert [(rule.resources, rule.names) for rule in binding] == [(("roles",), ("kvoy-router",))]
