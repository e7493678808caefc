"""Who a request is from: by its key, by the headers of a gateway, or by nothing."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from kvoy_contract.errors import BadRequest, Forbidden, Unauthorized
from kvoy_router.access import ANYBODY, Access, Client, with_client
from kvoy_router.http_message import Headers, Request
from kvoy_router.keys import cache_salt
from kvoy_router.keys_file import parse_keys

KEY = f"kvoy-aaaaaaaaaaaa-{'A' * 43}"


def ring_text(**changes: Any) -> str:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    entry = {"id": "aaaaaaaaaaaa", "hash": f"sha256:{digest}", "tenant": "team-a"}
    return json.dumps({"keys": [entry | changes]})


def access(text: str | None = None, objectives: dict[str, int] | None = None) -> Access:
    return Access(parse_keys(text) if text else None, objectives or {}, lambda: 0.0)


def request(*headers: tuple[bytes, bytes]) -> Request:
    return Request("POST", b"/v1/chat/completions", list(headers))


def keyed(**changes: Any) -> Client:
    return access(ring_text(**changes)).identify(
        request((b"authorization", b"Bearer " + KEY.encode()))
    )


def test_without_keys_everybody_is_anybody() -> None:
    assert access().identify(request()) is ANYBODY
    assert ANYBODY.priority_of(7) == 7
    assert ANYBODY.salt_of("x") == "x"
    assert ANYBODY.salt_of(None) is None


def test_a_key_says_who_a_client_is_and_goes_no_further() -> None:
    asked = request((b"authorization", b"Bearer " + KEY.encode()), (b"accept", b"*/*"))
    client = access(ring_text(priority=-3, weight=2)).identify(asked)

    assert (client.tenant, client.priority, client.weight) == ("team-a", -3, 2.0)
    assert asked.headers == [(b"accept", b"*/*")]


def test_where_keys_are_asked_for_nothing_goes_without_one() -> None:
    with pytest.raises(Unauthorized):
        access(ring_text()).identify(request((b"x-llm-d-inference-fairness-id", b"team-a")))


def test_a_request_with_a_key_can_ask_to_go_later_and_not_earlier() -> None:
    client = keyed(priority=5)

    assert client.priority_of(0) == 5
    assert client.priority_of(2) == 7
    assert client.priority_of(-1000) == 5


def test_a_key_keeps_to_its_models() -> None:
    with pytest.raises(Forbidden):
        keyed(models=["m1"]).check_model("m2")
    keyed(models=["m1"]).check_model("m1")
    ANYBODY.check_model("m2")


@pytest.mark.parametrize("brand", [b"llm-d", b"gateway"])
def test_headers_of_a_gateway_say_tenant_and_objective(brand: bytes) -> None:
    headers: Headers = [
        (b"x-%b-inference-fairness-id" % brand, b"team-x"),
        (b"x-%b-inference-objective" % brand, b"batch"),
    ]

    client = access(objectives={"batch": 10}).identify(request(*headers))

    assert (client.tenant, client.priority, client.key) == ("team-x", 10, None)
    assert client.priority_of(-3) == 10
    assert client.salt_of(None) is None


def test_an_objective_that_nobody_has_defined_has_the_middle_priority() -> None:
    client = access().identify(request((b"x-llm-d-inference-objective", b"new")))

    assert client.priority == 0


@pytest.mark.parametrize("value", [b"", b"a b", b"\xff", b"x" * 129])
def test_a_header_that_is_no_name_is_refused(value: bytes) -> None:
    with pytest.raises(BadRequest, match="fairness-id"):
        access().identify(request((b"x-llm-d-inference-fairness-id", value)))


def test_a_key_decides_whatever_the_headers_say() -> None:
    asked = request(
        (b"authorization", b"Bearer " + KEY.encode()),
        (b"x-llm-d-inference-fairness-id", b"other"),
        (b"x-llm-d-inference-objective", b"urgent"),
    )

    client = access(ring_text(), {"urgent": -100}).identify(asked)

    assert (client.tenant, client.priority) == ("team-a", 0)


def test_a_body_is_told_the_salt_and_priority_that_count_and_is_else_the_same() -> None:
    body = b'{"model": "m", "messages": [{"role":"user", "content":"\\u00e9 1.0"}], "priority": -9}'

    told = with_client(body, "salt", 5)

    assert json.loads(told) == json.loads(body) | {"cache_salt": "salt", "priority": 5}
    assert b'[{"role":"user", "content":"\\u00e9 1.0"}]' in told
    assert json.loads(with_client(told, None, None)) == {
        key: value for key, value in json.loads(body).items() if key != "priority"
    }


def test_a_salt_of_the_clients_own_is_mixed_with_the_tenants() -> None:
    client = keyed()
    assert client.key is not None

    assert client.salt_of("x") == cache_salt(client.key, "x") != client.salt_of(None)
