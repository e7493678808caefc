import pytest

from kvoy_contract.blocks import pack_tokens
from kvoy_contract.envelope import (
    Envelope,
    ResumeState,
    check_secret,
    decode,
    encode,
    secret_matches,
)
from kvoy_contract.errors import BadRequest

FULL = Envelope(
    router_id="r1",
    number=7,
    settled_through=5,
    request_id="req",
    token_ids=pack_tokens([1, 2, 3]),
    tokenizer_digest="d",
    seed=9,
    want_token_ids=True,
    resume=ResumeState([[4, 5]]),
    transfer_id="t",
)
# As the first version wrote it. Later ones read it, and understand the same.
GOLDEN = bytes.fromhex(
    "9c0000008aa9726f757465725f6964a27231a66e756d62657207af736574746c65645f7468726f75676805aa"
    "726571756573745f6964a3726571a9746f6b656e5f696473c40c010000000200000003000000b0746f6b656e"
    "697a65725f646967657374a164a47365656409ae77616e745f746f6b656e5f696473c3a6726573756d6581aa"
    "6f75747075745f69647391920405ab7472616e736665725f6964a1747b2261223a317d"
)


def test_an_envelope_of_the_first_version_is_understood() -> None:
    assert decode(GOLDEN) == (FULL, b'{"a":1}')


def test_what_is_encoded_comes_back_with_the_clients_own_bytes() -> None:
    least = Envelope(router_id="r", number=1)

    assert decode(encode(least, b"")) == (least, b"")
    assert decode(encode(FULL, b"\x00body")) == (FULL, b"\x00body")


def test_a_field_of_a_later_version_is_passed_over() -> None:
    head = b"\x83\xa9router_id\xa1r\xa6number\x01\xa5later\xc0"

    envelope, body = decode(len(head).to_bytes(4, "little") + head + b"{}")

    assert envelope == Envelope(router_id="r", number=1)
    assert body == b"{}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00",
        b"\x00\x00\x00\x00{}",
        b"\xff\xff\xff\xff{}",
        b"\x01\x00\x00\x00\xc1",
        b"\x02\x00\x00\x00\x80\x80",
        encode(FULL, b"")[:-1],
        encode(Envelope(router_id="r", number=1, token_ids=b"abc"), b"{}"),
    ],
)
def test_a_broken_envelope_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="envelope"):
        decode(data)


@pytest.mark.parametrize(
    ("expected", "shown", "matches"),
    [
        ("s", "s", True),
        ("s", "t", False),
        ("s", None, False),
        (None, "s", False),
        (None, None, False),
        ("", "", False),
        ("ß", "ß", True),
    ],
)
def test_only_the_configured_secret_matches(
    expected: str | None, shown: str | None, matches: bool
) -> None:
    assert secret_matches(expected, shown) == matches


@pytest.mark.parametrize("secret", [None, "", "s3cret", "a" * 1000, "!~-_="])
def test_a_secret_that_headers_can_carry_is_accepted(secret: str | None) -> None:
    check_secret(secret)


@pytest.mark.parametrize("secret", ["s\n", "\ts", "a b", "ß", "s\x00", " "])
def test_a_secret_that_no_header_can_carry_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="header"):
        check_secret(secret)
