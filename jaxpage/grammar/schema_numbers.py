"""Owns the check for numbers in schemas that llguidance gets wrong where they meet.

It must not know anything else of schemas.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

from jaxpage.grammar.schema_keywords import SchemaError

_BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_MEETING: Final = ("anyOf", "oneOf", "$ref")


class NumberChecks:
    """Looks at each schema by itself, and at all of them as one where some apply to the same value.

    Of an interval that begins open at an integer and ends before the next one ("above 0, below 0.5"), llguidance also
    takes the integer. Factors of ``multipleOf`` it multiplies in 32 bits.
    """

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] = []
        self._do_meet = False

    def look_at(self, where: str, plain: dict[str, Any]) -> None:
        """Takes note of one schema; ``where`` is its place, for messages.

        Raises:
            SchemaError: if it is wrong by itself.
        """
        found = {name: plain[name] for name in (*_BOUNDS, "multipleOf") if name in plain}
        if plain.get("type") == "integer":  # whole numbers it counts rightly
            found = {name: value for name, value in found.items() if name == "multipleOf"}
        if found:
            self._seen.append(found)
            _check(where, [found])
        others = set(plain) - {"type", *_MEETING}
        self._do_meet |= "allOf" in plain or (any(name in plain for name in _MEETING) and bool(others))

    def finish(self) -> None:
        """Looks at what meets.

        Raises:
            SchemaError: if some of the numbers could be wrong together.
        """
        if self._do_meet:
            _check("$", self._seen)


def _check(where: str, schemas: list[dict[str, Any]]) -> None:
    def values(*names: str) -> set[float]:
        return {each[name] for each in schemas for name in names if name in each}

    above, below = values("exclusiveMinimum"), values("exclusiveMaximum")
    if any(isinstance(low, int) and 0 < high - low < 1 for low in above for high in below | values("maximum")):
        raise SchemaError(f"{where}: exclusiveMinimum with a maximum less than 1 above it is not supported")
    if any(isinstance(high, int) and 0 < high - low < 1 for high in below for low in above | values("minimum")):
        raise SchemaError(f"{where}: exclusiveMaximum with a minimum less than 1 below it is not supported")
    if _product({Decimal(str(value)) for value in values("multipleOf")}) >= 2**32:
        raise SchemaError(f"{where}: the values of multipleOf have too many digits together")


def _product(factors: set[Decimal]) -> int:
    """Of the factors as integers, all in the unit of the finest one."""
    digits = max((-int(factor.as_tuple().exponent) for factor in factors), default=0)
    product = 1
    for factor in factors:
        product *= int(factor.scaleb(max(digits, 0)))
    return product
