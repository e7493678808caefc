"""Kubernetes quantities: `500m`, `8Gi`, `1e3`, read exactly as the API server reads them.

A value finer than a billionth is rounded up, away from zero, and one beyond 2^63 - 1 is cut to
that, as Kubernetes' own parser does.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, ROUND_UP, Context, Decimal
from typing import Final

QUANTITY_PATTERN: Final = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$"
)
MAX_QUANTITY_LENGTH: Final = 64

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]+))?"
)
_SUFFIXES: Final = {
    **{suffix: Decimal(10) ** power for suffix, power in zip("num", (-9, -6, -3), strict=True)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
_NANO: Final = Decimal("1e-9")
_MAX: Final = Decimal(2**63 - 1)
_EXACT: Final = Context(prec=160)
"""More digits than any quantity of `MAX_QUANTITY_LENGTH` characters within the limits has."""
_MAX_EXPONENT: Final = 99
"""Beyond it a number of that length is cut or rounded whatever its digits are."""


def parse_quantity(quantity: str | int) -> Decimal:
    """Raises ValueError for what is no quantity."""
    text = str(quantity)
    match = _QUANTITY.fullmatch(text)
    if match is None or len(text) > MAX_QUANTITY_LENGTH:
        raise ValueError(f"{text!r} is not a quantity such as 500m, 2 or 8Gi")
    value = Decimal(match["number"])
    if match["suffix"]:
        value = _EXACT.multiply(value, _SUFFIXES[match["suffix"]])
    elif match["exponent"]:
        exponent = max(-_MAX_EXPONENT, min(int(match["exponent"]), _MAX_EXPONENT))
        value = value.scaleb(exponent, _EXACT)
    limited = max(-_MAX, min(value, _MAX))
    return limited.quantize(_NANO, rounding=ROUND_UP, context=_EXACT)


def is_equal_quantity(one: str | int, other: str | int) -> bool:
    """Whether both are the same amount: `8Gi` and `8192Mi`, `1` and `1000m`.

    Raises ValueError for what is no quantity.
    """
    return parse_quantity(one) == parse_quantity(other)


def quantity_to_int(quantity: str | int) -> int:
    """The amount in whole units, rounded up as Kubernetes rounds. Raises ValueError."""
    return int(parse_quantity(quantity).to_integral_value(rounding=ROUND_CEILING))
