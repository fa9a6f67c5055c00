"""Owns finding the place in a schema that a compiler refuses without saying where.

It must not know compilers, or what keywords mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from jaxpage.grammar.schema_keywords import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS, Place, SchemaError

TIME_LIMIT_S: Final = 1.0
"""For the search; after it the place found so far, which holds the fault, is good enough."""


def blamed(schema: Any, reason: str, refusal: Callable[[Place], str | None]) -> Place:
    """The innermost part of ``schema`` that is refused for the same ``reason`` as the whole.

    Args:
        refusal: why the part at a place does not compile by itself; None if it does.
    """
    deadline_s = time.monotonic() + TIME_LIMIT_S
    place: Place = ()
    while True:
        for inner, part in _parts(schema):
            if time.monotonic() > deadline_s:
                return place
            if _refusal(refusal, (*place, *inner)) == reason:
                place, schema = (*place, *inner), part
                break
        else:
            return place


def _refusal(refusal: Callable[[Place], str | None], place: Place) -> str | None:
    try:
        return refusal(place)
    except SchemaError:
        return None  # some keywords can stand at the root only


def _parts(schema: Any) -> Iterator[tuple[Place, Any]]:
    """The schemas directly inside of a schema, and the keys that lead there."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAPS and isinstance(value, dict):
            yield from (((keyword, name), part) for name, part in value.items())
        elif keyword in (*SCHEMA_LISTS, *SCHEMAS) and isinstance(value, list):
            yield from (((keyword, str(index)), part) for index, part in enumerate(value))
        elif keyword in SCHEMAS:
            yield (keyword,), value
