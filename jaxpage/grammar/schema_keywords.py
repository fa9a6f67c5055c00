"""Owns which JSON Schema keywords there are for us, and of which form the value of each has to be.

It must not know what a keyword means for a grammar. What is not listed here is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from jaxpage.errors import shown

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
EXACT: Final = 2**53
"""Beyond this one not every integer is a double, and llguidance counts in doubles."""

MAX_COUNT: Final = 2**31 - 1

NEWEST_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
OLD_DIALECTS: Final = (
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
)
"""Here a list in ``items`` is what ``prefixItems`` is today."""


Place = tuple[str, ...]
"""Keys that lead from the root of a schema to a value."""


class SchemaError(ValueError):
    """The schema is malformed, or says what no grammar of ours can; the message is one line that names the keyword."""


def shown_place(place: Place) -> str:
    """A place as it stands in messages, such as ``$.properties.name``."""
    text = ".".join(("$", *place))
    return text if len(text) <= 100 else text[:97] + "..."


def is_number(value: Any) -> bool:
    """Whether a value is a JSON number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MAX_COUNT and float(value).is_integer()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_filled(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value)) and len(set(value)) == len(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and _are_names(names) and set(names) <= set(TYPES)


Form = tuple[Callable[[Any], bool], str]
_NUMBER: Final[Form] = (is_number, "a number")
_COUNT: Final[Form] = (_is_count, f"an integer in [0, {MAX_COUNT}]")
_TEXT: Final[Form] = (_is_text, "a string")
_FLAG: Final[Form] = (_is_flag, "true or false")
_OBJECT: Final[Form] = (_is_object, "an object")
_FILLED: Final[Form] = (_is_filled, "a list that is not empty")
_ANYTHING: Final[Form] = (lambda value: True, "anything")

ANNOTATIONS: Final[dict[str, Form]] = {
    "title": _TEXT,
    "description": _TEXT,
    "default": _ANYTHING,
    "examples": (lambda value: isinstance(value, list), "a list"),
    "deprecated": _FLAG,
    "readOnly": _FLAG,
    "writeOnly": _FLAG,
    "contentEncoding": _TEXT,
    "contentMediaType": _TEXT,
    "discriminator": _OBJECT,  # OpenAPI's hint which alternative to try first; libraries write it beside oneOf
    "$comment": _TEXT,
    "$anchor": _TEXT,  # a name for a $ref, and such a $ref is refused
}
"""Keywords that no value has to obey."""

AT_ROOT: Final = ("$schema", "$id")
SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
SCHEMAS: Final = ("items", "additionalProperties")

APPLIED_LAST: Final = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")
"""llguidance goes through a schema from top to bottom, and what stands before one of these does not see what stands
behind; moved to the end they change nothing."""

_ASSERTIONS: Final[dict[str, Form]] = {
    "type": (_is_type, f"one or several of {', '.join(TYPES)}"),
    "const": _ANYTHING,
    "enum": _FILLED,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "exclusiveMaximum": _NUMBER,
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "pattern": _TEXT,
    "format": _TEXT,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "minProperties": _COUNT,
    "maxProperties": _COUNT,
    "required": (_are_names, "a list of distinct strings"),
    "$ref": _TEXT,
    "$schema": _TEXT,
    "$id": _TEXT,
    "additionalItems": _ANYTHING,  # a schema, and looked at as one where it means something
}
_FORMS: Final[dict[str, Form]] = (
    ANNOTATIONS
    | _ASSERTIONS
    | dict.fromkeys(SCHEMA_MAPS, _OBJECT)
    | dict.fromkeys(SCHEMA_LISTS, _FILLED)
    | dict.fromkeys(SCHEMAS, _ANYTHING)
)


def check_form(place: str, keyword: str, value: Any) -> None:
    """Refuses keywords that are not supported, and values of the wrong form.

    Raises:
        SchemaError: naming the keyword.
    """
    form = _FORMS.get(keyword)
    if form is None:
        raise SchemaError(f"{place}: the keyword {shown(keyword)} is not supported")
    is_right, wanted = form
    if not is_right(value):
        raise SchemaError(f"{place}: {keyword} must be {wanted}, got {shown(value)}")


def exact(place: str, keyword: str, value: float) -> float:
    """A number of a schema, as an int if it is integral.

    Raises:
        SchemaError: if it is not finite, or so large that llguidance would round it.
    """
    if not math.isfinite(value) or abs(value) > EXACT:
        raise SchemaError(f"{place}: {keyword} is beyond 2^53, got {shown(value)}")
    return int(value) if float(value).is_integer() else value
