"""Quantities: by hand, and as the API server itself reads them."""

from __future__ import annotations

from decimal import Decimal
from random import Random
from typing import Any

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_operator.quantities import is_equal_quantity, parse_quantity, quantity_to_int


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", "0"),
        (3, "3"),
        ("100n", "1e-7"),
        ("100u", "1e-4"),
        ("100m", "0.1"),
        ("1k", "1000"),
        ("1M", "1e6"),
        ("1G", "1e9"),
        ("1T", "1e12"),
        ("1P", "1e15"),
        ("1E", "1e18"),
        ("1Ki", "1024"),
        ("1Mi", "1048576"),
        ("1.5Gi", "1610612736"),
        ("1Ti", "1099511627776"),
        ("1Pi", "1125899906842624"),
        ("1Ei", "1152921504606846976"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("1.5e-1", "0.15"),
        ("+2.", "2"),
        (".5", "0.5"),
        ("-1", "-1"),
        # Finer than a billionth: away from zero.
        ("0.1n", "1e-9"),
        ("-0.1n", "-1e-9"),
        ("1e-99", "1e-9"),
        # Too large: cut.
        ("9223372036854775808", "9223372036854775807"),
        ("1e999999999999", "9223372036854775807"),
        ("100E", "9223372036854775807"),
    ],
)
def test_a_quantity_is_this_amount(text: str | int, amount: str) -> None:
    assert parse_quantity(text) == Decimal(amount)


@pytest.mark.parametrize(
    "text",
    ["", "1 Gi", "Gi", "1gi", "1K", "1e", "1e1.5", "1.5.1", "0x10", "1GiB", "--1", "1\n", "٣"],
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity such as"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("one", "other"), [("8Gi", "8192Mi"), ("1", "1000m"), (2, "2"), ("1e3", "1k"), ("0.5", "500m")]
)
def test_one_amount_may_be_written_in_two_ways(one: str | int, other: str | int) -> None:
    assert is_equal_quantity(one, other)


def test_close_amounts_are_not_equal() -> None:
    assert not is_equal_quantity("1G", "1Gi")
    assert not is_equal_quantity("1", "1001m")


@pytest.mark.parametrize(("text", "whole"), [("1500m", 2), ("2", 2), ("1Ki", 1024), ("1n", 1)])
def test_whole_units_are_rounded_up(text: str, whole: int) -> None:
    assert quantity_to_int(text) == whole


@pytest.mark.slow
def test_the_api_server_reads_random_quantities_alike(api_server: ApiServer) -> None:
    texts = [random_quantity(Random(seed)) for seed in range(400)]

    canonical = canonical_forms(api_server, texts)

    assert any(text != form for text, form in zip(texts, canonical, strict=True))
    for text, form in zip(texts, canonical, strict=True):
        assert is_equal_quantity(text, form), (text, form)


def random_quantity(random: Random) -> str:
    """Not negative: a volume has no negative size."""
    digits = str(random.randrange(10 ** random.randrange(1, 20)))
    point = random.randrange(len(digits) + 1)
    number: str = random.choice([digits, f"{digits[:point]}.{digits[point:]}"])
    suffixes = ["", *"numkMGTPE", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
    exponent = f"{random.choice('eE')}{random.choice(['', '+', '-'])}{random.randrange(25)}"
    return f"{number}{random.choice([*suffixes, exponent])}"


def canonical_forms(server: ApiServer, texts: list[str]) -> list[str]:
    """As the API server writes them after reading: as sizes of volumes, which may be any."""
    volumes = [{"name": f"v{n}", "emptyDir": {"sizeLimit": text}} for n, text in enumerate(texts)]
    pod = {
        "metadata": {"name": "volumes"},
        "spec": {"containers": [{"name": "a", "image": "a"}], "volumes": volumes},
    }
    path = f"/api/v1/namespaces/{server.create_namespace()}/pods?dryRun=All"
    created: dict[str, Any] = server.api.request("POST", path, pod)
    forms = {volume["name"]: volume for volume in created["spec"]["volumes"]}
    return [forms[f"v{n}"]["emptyDir"]["sizeLimit"] for n in range(len(texts))]
