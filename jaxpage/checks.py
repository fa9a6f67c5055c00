"""The checks of single values that users give: of the right type, and within limits.

Nothing here knows what a value is for.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpage.errors import ParameterError, shown

HIGHEST = sys.float_info.max
LOWEST = -HIGHEST
"""Of the finite floats."""


def check_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """``value`` as an int within [low, high]. Integral floats pass, booleans and strings do not.

    Raises:
        ParameterError: naming the parameter and the value.
    """
    if type(value) is int and (low is None or value >= low) and (high is None or value <= high):
        return value
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"must be an integer, got {shown(value)}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise ParameterError(name, f"must be {_range_text(low, high)}, got {value}")
    return value


def check_float(name: str, value: Any, low: float | None = None, high: float | None = None) -> float:
    """``value`` as a finite float within [low, high]; raises ParameterError otherwise."""
    if type(value) is float and (LOWEST if low is None else low) <= value <= (HIGHEST if high is None else high):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterError(name, f"must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ParameterError(name, f"must be finite, got {shown(value)}")
    if (low is not None and number < low) or (high is not None and number > high):
        raise ParameterError(name, f"must be {_range_text(low, high)}, got {shown(value)}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """``value`` if it is a boolean; raises ParameterError otherwise."""
    if not isinstance(value, bool):
        raise ParameterError(name, f"must be true or false, got {shown(value)}")
    return value


def check_cache_salt(name: str, value: Any) -> str:
    """``value`` if it is a string of 1 to 128 characters, none a control character; raises ParameterError otherwise."""
    is_text = isinstance(value, str) and 1 <= len(value) <= 128
    if not is_text or any(not character.isprintable() and ord(character) < 0xA0 for character in value):
        raise ParameterError(name, f"must have 1 to 128 characters and no control characters, got {shown(value)}")
    return value


def check_token_ids(name: str, value: Any, vocab_size: int | None = None) -> list[int]:
    """``value`` as a list of token ids, each in [0, vocab_size); raises ParameterError naming the bad index."""
    if type(value) is not list and (isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence)):
        raise ParameterError(name, f"must be a list of token ids, got {shown(value)}")
    if not value:
        return []
    high = None if vocab_size is None else vocab_size - 1
    # The common case (thousands of plain ints in range) must not pay for any Python code per token.
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= (2**31 if high is None else high):
        return list(value)
    return [check_int(f"{name}[{index}]", token, 0, high) for index, token in enumerate(value)]


def _range_text(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"in [{low}, {high}]"
    return f"at least {low}" if low is not None else f"at most {high}"
