"""Owns the check that every value a schema lets a model begin can also be ended.

It must not know keywords beyond those that make a value need another one. A schema that needs itself ("an object has to
have a child, which is such an object") accepts nothing, and as a grammar it is a trap: each token is legal and none the
last. Other ways to accept nothing show while a grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from jaxpage.grammar.schema_keywords import SCHEMA_LISTS, SCHEMAS, TYPES, Place, SchemaError, shown_place

MAX_LOOKS: Final = 300_000
"""Schemas looked at before the check gives up: about a second."""


def check_endings(schema: dict[str, Any], places: Mapping[str, Place]) -> None:
    """Looks at a normalised schema and its ``$defs``.

    Args:
        places: where the client has what a ``$ref`` of ours refers to, for messages.

    Raises:
        SchemaError: if some part of it needs itself without end, or if that takes too long to find out.
    """
    named = {f"#/$defs/{name}": each for name, each in schema.get("$defs", {}).items()} | {"#": schema}
    endings = _Endings()
    found = True
    while found:  # the smallest set: what ends because all that it needs ends
        new = [name for name, each in named.items() if name not in endings.known and endings.ends(each)]
        endings.known.update(new)
        found = bool(new)
    for name, each in named.items():
        if not all(endings.ends(part) for part in _parts(each)):
            raise SchemaError(
                f"{shown_place(places[name])}: $ref: a value would need another one like it inside, without end"
            )


def _parts(schema: Any) -> Iterator[Any]:
    """The schema and all those inside of it, without definitions."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for keyword in SCHEMAS:
            pending.append(part.get(keyword))
        for keyword in SCHEMA_LISTS:
            pending.extend(part.get(keyword, ()))
        for keyword in ("properties", "patternProperties"):
            pending.extend(part.get(keyword, {}).values())


class _Endings:
    """Which definitions are known to have a value that ends."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._num_looks = 0

    def ends(self, schema: Any) -> bool:
        """Whether some value can be ended; True also where there is no value at all."""
        self._num_looks += 1
        if self._num_looks > MAX_LOOKS:
            raise SchemaError("$: $ref: the definitions refer to each other in too many ways")
        if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
            return True
        types = schema.get("type", TYPES)
        if not any(self._type_ends(schema, name) for name in ([types] if isinstance(types, str) else types)):
            return False
        if "$ref" in schema and schema["$ref"] not in self.known:
            return False
        if not all(self.ends(each) for each in schema.get("allOf", ())):
            return False
        return all(any(self.ends(each) for each in schema.get(keyword, (True,))) for keyword in ("anyOf", "oneOf"))

    def _type_ends(self, schema: dict[str, Any], name: str) -> bool:
        if name == "array":
            least, first = int(schema.get("minItems", 0)), schema.get("prefixItems", [])
            needed = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
        elif name == "object":
            properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
            needed = [properties.get(each, rest) for each in schema.get("required", ())]
            if schema.get("minProperties") and not properties and "patternProperties" not in schema:
                needed.append(rest)
        else:
            return True
        return all(self.ends(each) for each in needed)
