"""Owns the vocabulary in which fields and answers are described: short functions for JSON Schema.

It must not know any endpoint.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANYTHING: Schema = {}
NOTHING: Schema = {"enum": [None, False, 0, "", [], {}]}
"""For fields that are known but not supported: what says the same as leaving them out."""


def integer(low: int | None = None, high: int | None = None) -> Schema:
    """Integers in [low, high]."""
    return {"type": "integer"} | _range(low, high)


def number(low: float | None = None, high: float | None = None) -> Schema:
    """Numbers in [low, high]."""
    return {"type": "number"} | _range(low, high)


def choice(*values: str) -> Schema:
    """One of some words."""
    return {"type": "string", "enum": list(values)}


def array(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    """Lists of ``low`` to ``high`` items."""
    return {"type": "array", "items": items} | ({"minItems": low} if low else {}) | ({"maxItems": high} if high else {})


def object_of(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """Objects with known fields; others may be there, too. Optional fields may be null, which says the same."""
    properties = required | {name: nullable(schema) for name, schema in (optional or {}).items()}
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


def nullable(schema: Schema) -> Schema:
    """``schema`` or null."""
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return schema if schema == NULL else schema | {"type": [schema["type"], "null"]}
    return any_of(schema, NULL) if schema else schema


def any_of(*schemas: Schema) -> Schema:
    """Whatever fits one of ``schemas``."""
    return {"anyOf": list(schemas)}


def ref(name: str) -> Schema:
    """The component ``name``."""
    return {"$ref": f"#/components/schemas/{name}"}


def _range(low: float | None, high: float | None) -> Schema:
    return ({} if low is None else {"minimum": low}) | ({} if high is None else {"maximum": high})
