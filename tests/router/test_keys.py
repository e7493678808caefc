"""API keys: files of them, who they let in, their limits, and the salt of a tenant's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvoy_contract.errors import Forbidden, Saturated, Unauthorized
from kvoy_router import keys_command
from kvoy_router.keys import Key, Keyring, cache_salt, new_key
from kvoy_router.keys_file import KeysFile, parse_keys
from kvoy_router.keys_limits import KeyLimits

SECRET = "A" * 43
NOW_S = 1_700_000_000.0


def text_of(key_id: str = "aaaaaaaaaaaa") -> str:
    return f"kvoy-{key_id}-{SECRET}"


def entry(key_id: str = "aaaaaaaaaaaa", /, **changes: Any) -> dict[str, Any]:
    """`changes` with underscores for hyphens."""
    digest = hashlib.sha256(text_of(key_id).encode()).hexdigest()
    values = {"id": key_id, "hash": f"sha256:{digest}", "tenant": "team-a"}
    return values | {name.replace("_", "-"): value for name, value in changes.items()}


def keys_text(*entries: dict[str, Any]) -> str:
    return json.dumps({"keys": entries})


def key_of(**changes: Any) -> Key:
    return parse_keys(keys_text(entry(**changes))).by_id["aaaaaaaaaaaa"]


def bearer(text: str) -> bytes:
    return f"Bearer {text}".encode()


# The file


def test_a_file_of_keys_is_read() -> None:
    ring = parse_keys(
        """
        keys:
        - id: aaaaaaaaaaaa
          hash: sha256:0000000000000000000000000000000000000000000000000000000000000000
          tenant: team-a
          priority: -5
          weight: 2
          requests-per-minute: 60
          tokens-per-minute: 100000
          models: [m1, m2]
          expires: 2030-01-01T00:00:00Z
          shares-cache: true
        """
    )

    key = ring.by_id["aaaaaaaaaaaa"]
    assert (key.tenant, key.priority, key.weight) == ("team-a", -5, 2.0)
    assert (key.requests_per_minute, key.tokens_per_minute) == (60, 100_000)
    assert key.models == ("m1", "m2")
    assert key.expires == datetime(2030, 1, 1, tzinfo=UTC)
    assert key.shares_cache


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("keys: [", "line"),
        ("[]", "object"),
        ("{}", "`keys`"),
        ("keys: []\nkey: 1", "`key`"),
        (keys_text(entry(tenannt="x")), "`tenannt`"),
        (keys_text(entry(id="x")), "keys[0].id"),
        (keys_text(entry(hash=SECRET)), "keys[0].hash"),
        (keys_text(entry(tenant="a b")), "keys[0].tenant"),
        (keys_text(entry(priority=1001)), "keys[0].priority"),
        (keys_text(entry(weight=0)), "keys[0].weight"),
        (keys_text(entry(requests_per_minute=0)), "keys[0].requests-per-minute"),
        (keys_text(entry(expires="2030-01-01T00:00:00")), "keys[0].expires"),
        (keys_text(entry(models="m1")), "keys[0].models"),
        (keys_text(entry(), entry()), "aaaaaaaaaaaa twice"),
        (keys_text(entry(), entry("bbbbbbbbbbbb", weight=2)), "bbbbbbbbbbbb: weight"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        parse_keys(text)


def test_a_bad_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        KeysFile(tmp_path / "none", lambda ring: None)
    (tmp_path / "bad").write_text("keys: 1")
    with pytest.raises(ValueError, match="keys"):
        KeysFile(tmp_path / "bad", lambda ring: None)


def test_a_changed_file_counts_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(keys_text(entry()))
    applied: list[Keyring] = []
    file = KeysFile(path, applied.append)
    assert len(file.keyring) == 1

    path.write_text(keys_text(entry(), entry("bbbbbbbbbbbb")))
    file.check()
    assert [len(ring) for ring in applied] == [2]

    path.write_text(keys_text(entry(), entry("cccccccccccc", tenannt="x")))
    with caplog.at_level(logging.ERROR):
        file.check()
        file.check()
    assert len(file.keyring) == 2
    assert "tenannt" in (file.error or "")
    assert len(caplog.records) == 1

    path.write_text(keys_text(entry()))
    file.check()
    assert file.error is None
    assert len(file.keyring) == 1


# Who is let in


def test_the_right_key_is_known_by_its_hash() -> None:
    ring = parse_keys(keys_text(entry(), entry("bbbbbbbbbbbb", tenant="team-b")))

    assert ring.identify(bearer(text_of("bbbbbbbbbbbb")), NOW_S).tenant == "team-b"
    assert ring.identify(b"bearer   " + text_of().encode() + b" ", NOW_S).tenant == "team-a"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        (b"", "missing_api_key"),
        (b"Bearer", "missing_api_key"),
        (b"Basic dXNlcjpwYXNz", "missing_api_key"),
        (bearer("sk-something"), "invalid_api_key"),
        (bearer(f"kvoy-aaaaaaaaaaaa-{'B' * 43}"), "invalid_api_key"),
        (bearer(text_of("bbbbbbbbbbbb")), "invalid_api_key"),
        (bearer(text_of()) + b"x", "invalid_api_key"),
        (b"Bearer \xff\xfe", "invalid_api_key"),
        (bearer(text_of("cccccccccccc")), "expired_api_key"),
    ],
)
def test_other_headers_are_refused_without_repeating_them(header: bytes | None, code: str) -> None:
    gone = entry("cccccccccccc", expires="2020-01-01T00:00:00Z")
    ring = parse_keys(keys_text(entry(), gone))

    with pytest.raises(Unauthorized) as refused:
        ring.identify(header, NOW_S)

    assert refused.value.code == code
    assert SECRET not in refused.value.message
    assert "something" not in refused.value.message


def test_a_key_for_some_models_is_refused_others() -> None:
    key = key_of(models=["m1"])
    key.check_model("m1")

    with pytest.raises(Forbidden) as refused:
        key.check_model("m2")
    assert refused.value.param == "model"


def test_a_new_key_is_known_by_the_entry_that_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["new", "--tenant", "team-a", "--model", "m1", "--expires-in-days", "30"]
    assert keys_command.main([*arguments, "--requests-per-minute", "60"]) == 0

    out, err = capsys.readouterr()
    printed = "\n".join(line for line in err.splitlines() if not line.startswith("#"))
    ring = parse_keys(f"keys:\n{printed}")
    now_s = datetime.now(UTC).timestamp()
    key = ring.identify(bearer(out.strip()), now_s)
    assert (key.tenant, key.models, key.requests_per_minute) == ("team-a", ("m1",), 60)
    assert out.strip() not in err
    with pytest.raises(Unauthorized):
        ring.identify(bearer(out.strip()), now_s + 31 * 86_400)


def test_a_new_key_with_a_wrong_field_is_refused_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        keys_command.main(["new", "--tenant", "a b"])

    assert "tenant" in capsys.readouterr().err


def test_ids_of_new_keys_are_never_numbers_in_yaml() -> None:
    for _ in range(300):
        _, key_id, digest = new_key()
        text = f"keys:\n- id: {key_id}\n  hash: {digest}\n  tenant: t"
        assert list(parse_keys(text).by_id) == [key_id]


# Limits


def test_requests_beyond_the_limit_are_told_when_to_come_again() -> None:
    limits, key = KeyLimits(), key_of(requests_per_minute=30)
    for _ in range(30):
        limits.take_request(key, 0.0)

    with pytest.raises(Saturated) as refused:
        limits.take_request(key, 0.0)

    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.retry_after_s == pytest.approx(2.0)
    limits.take_request(key, 2.0)
    with pytest.raises(Saturated):
        limits.take_request(key, 2.0)


def test_tokens_beyond_the_limit_have_to_drip_in_again() -> None:
    limits, key = KeyLimits(), key_of(tokens_per_minute=6000)
    limits.take_request(key, 0.0)
    limits.take_tokens(key, 6500, 0.0)

    with pytest.raises(Saturated) as refused:
        limits.take_request(key, 0.0)

    assert refused.value.retry_after_s == pytest.approx(5.0, abs=0.1)
    limits.take_request(key, 5.1)


def test_a_refused_request_uses_up_nothing() -> None:
    limits = KeyLimits()
    key = key_of(requests_per_minute=1, tokens_per_minute=60)
    limits.take_tokens(key, 120, 0.0)
    for _ in range(5):
        with pytest.raises(Saturated):
            limits.take_request(key, 0.0)

    limits.take_request(key, 61.0 + 0.1)


def test_a_changed_limit_keeps_what_is_used_up_and_a_gone_key_is_forgotten() -> None:
    limits = KeyLimits()
    for _ in range(10):
        limits.take_request(key_of(requests_per_minute=10), 0.0)

    with pytest.raises(Saturated):
        limits.take_request(key_of(requests_per_minute=20), 0.0)
    limits.keep_only(())
    assert len(limits) == 0


# The cache of a tenant


def test_tenants_never_share_a_salt_whatever_they_ask_for() -> None:
    one, other = key_of(tenant="one"), key_of(tenant="other")
    asked = [None, "x", cache_salt(other, None), cache_salt(other, "x"), "other", "one"]

    ones = {cache_salt(one, salt) for salt in asked}
    others = {cache_salt(other, salt) for salt in asked}

    assert len(ones) == len(others) == len(asked)
    assert not ones & others


def test_keys_of_one_tenant_share_a_salt_and_some_share_with_everybody() -> None:
    assert cache_salt(key_of(), None) == cache_salt(key_of(priority=3), None)
    open_key = key_of(shares_cache=True)
    assert cache_salt(open_key, None) is None
    assert cache_salt(open_key, "x") == "x"
