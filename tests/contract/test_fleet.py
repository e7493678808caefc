"""The document that tells a router whose engines it may trust."""

from __future__ import annotations

import msgspec
import pytest

from kvoy_contract.fleet import Fleet, FleetService, parse_fleet, render_fleet

FLEET = Fleet(
    services=(
        FleetService(name="qwen", uid="u-1", model="Qwen/Qwen3-8B", secret="s1"),
        FleetService(name="canary", uid="u-2", model="Qwen/Qwen3-8B", secret="s2", weight=10),
    )
)


def test_a_fleet_survives_its_text() -> None:
    assert parse_fleet(render_fleet(FLEET)) == FLEET


def test_a_field_of_a_newer_version_is_ignored() -> None:
    text = render_fleet(FLEET).replace("- name: qwen", "- name: qwen\n  future: 1")

    assert parse_fleet(text) == FLEET


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("services: 1", "services"),
        ("{}", "services"),
        ("services: [{name: a, uid: u, model: m}]", "secret"),
        ("services: [{name: a, uid: u, model: m, secret: s, weight: -1}]", "weight"),
        ("services: [{name: a, uid: u, model: m, secret: s, weight: 1001}]", "weight"),
        ("services: [{name: '', uid: u, model: m, secret: s}]", "name"),
        ("services: [", "fleet"),
        ("services: [{name: a, uid: u, model: m, secret: 's s'}]", "a: the secret"),
    ],
)
def test_a_wrong_fleet_is_refused_by_the_field(text: str, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        parse_fleet(text)


@pytest.mark.parametrize("field", ["name", "uid"])
def test_a_service_stands_in_a_fleet_once(field: str) -> None:
    first, second = FLEET.services
    twin = msgspec.structs.replace(second, **{field: getattr(first, field)})

    with pytest.raises(ValueError, match=f"the same {field} twice"):
        parse_fleet(render_fleet(Fleet(services=(first, twin))))
