"""Owns the check of JSON schemas and their rewriting into what llguidance enforces to the letter.

It must not know grammars or tokens. A keyword is enforced or refused by name, never ignored. What differs from
llguidance's own reading of a schema, and why:

- ``$ref`` reaches only into the same document; targets become ``$defs`` of ours.
- ``pattern`` is translated (``pattern.py``), ``format`` replaced where llguidance's is too wide (``formats.py``).
- Strings in constants may hold only what strings without ``\\u`` escapes can.
- An alternative of ``oneOf`` that is a ``$ref`` is written out: only so it can be seen to exclude the others.
- Numbers beyond 2^53 and ``minProperties`` above 1 (the keys of a map may repeat) are refused.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

from jaxpage.errors import shown
from jaxpage.grammar.formats import NATIVE, PATTERNS
from jaxpage.grammar.pattern import PatternError, is_writable, translated
from jaxpage.grammar.schema_endings import check_endings
from jaxpage.grammar.schema_keywords import (
    ANNOTATIONS,
    APPLIED_LAST,
    AT_ROOT,
    NEWEST_DIALECT,
    OLD_DIALECTS,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    Place,
    SchemaError,
    check_form,
    exact,
    is_number,
    shown_place,
)
from jaxpage.grammar.schema_numbers import NumberChecks

MAX_DEPTH: Final = 64
MAX_SCHEMAS: Final = 20_000
MAX_PROPERTIES: Final = 1_000
"""Of one object. llguidance's time to compile them grows with the square of their number: 1,000 take 0.1 s."""
MAX_ALTERNATIVES: Final = 1_000
"""Of one ``anyOf``, ``oneOf`` or ``enum``, scalars not counted: each is followed by itself."""
MAX_TARGETS: Final = 1_000
_HOIST_EVERY: Final = 16
"""Depths at which a subschema moves to ``$defs``, because llguidance's parser ends at 128 nested brackets."""


def normalized(schema: Any, place: Place = ()) -> dict[str, Any]:
    """A schema that llguidance takes and that accepts the same values as ``schema``, or fewer.

    Args:
        place: of the part that is wanted; the rest is there for its references.

    Raises:
        SchemaError: naming place and keyword of the first thing that is malformed or not supported.
    """
    return _Normalizer(schema).run(place)


class _Normalizer:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._is_old = False
        self._num_schemas = 0
        self._names: dict[Place, str] = {}
        self._pending: list[Place] = []
        self._defs: dict[str, Any] = {}
        self._deep: dict[str, Place] = {}
        self._numbers = NumberChecks()

    def run(self, start: Place) -> dict[str, Any]:
        if isinstance(self._root, dict):
            self._read_dialect(self._root)
        body = self._schema(self._target(start), start, 1)
        while self._pending:
            place = self._pending.pop()
            self._defs[self._names[place]] = self._schema(self._target(place), place, 1)
        if isinstance(body, bool):
            body = {} if body else {"anyOf": [False]}
        self._numbers.finish()
        whole = body | ({"$defs": self._defs} if self._defs else {})
        named = {f"#/$defs/{name}": place for place, name in self._names.items()} | self._deep
        check_endings(whole, named | {"#": start})
        return whole

    def _read_dialect(self, root: dict[str, Any]) -> None:
        dialect = root.get("$schema", NEWEST_DIALECT)
        check_form("$", "$schema", dialect)
        dialect = dialect.removesuffix("#")
        if dialect != NEWEST_DIALECT and dialect not in OLD_DIALECTS:
            raise SchemaError(f"$: the dialect {shown(dialect)} of $schema is not supported")
        self._is_old = dialect != NEWEST_DIALECT

    def _schema(self, schema: Any, place: Place, depth: int) -> Any:
        """One schema; ``depth`` counts the schemas around it."""
        where = shown_place(place)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(f"{where}: a schema must be an object, true or false, got {shown(schema)}")
        self._num_schemas += 1
        if depth > MAX_DEPTH or self._num_schemas > MAX_SCHEMAS:
            limit = f"nested more than {MAX_DEPTH} deep" if depth > MAX_DEPTH else f"more than {MAX_SCHEMAS}"
            raise SchemaError(f"{where}: schemas are {limit}")
        plain: dict[str, Any] = {}
        for keyword, value in schema.items():
            check_form(where, keyword, value)
            if keyword in AT_ROOT and place:
                raise SchemaError(f"{where}: {keyword} is only supported at the top of the schema")
            if keyword not in ANNOTATIONS and keyword not in AT_ROOT:
                self._keyword(plain, schema, keyword, place, depth)
        self._numbers.look_at(where, plain)
        ordered = {keyword: value for keyword, value in plain.items() if keyword not in APPLIED_LAST}
        ordered |= {keyword: plain[keyword] for keyword in APPLIED_LAST if keyword in plain}
        if depth % _HOIST_EVERY:
            return ordered
        name = f"deep{len(self._defs)}"
        self._defs[name] = ordered
        self._deep[f"#/$defs/{name}"] = place
        return {"$ref": f"#/$defs/{name}"}

    def _keyword(self, plain: dict[str, Any], schema: dict[str, Any], keyword: str, place: Place, depth: int) -> None:
        """Adds what one keyword says to ``plain``."""
        value, here, where = schema[keyword], (*place, keyword), shown_place(place)
        if keyword in ("items", "additionalItems", "prefixItems"):
            self._items(plain, schema, keyword, place, depth)
        elif keyword in SCHEMA_MAPS:
            self._schema_map(plain, keyword, value, here, depth)
        elif keyword in ("anyOf", "oneOf", "enum") and _num_branches(value) > MAX_ALTERNATIVES:
            raise SchemaError(f"{where}: {keyword} has more than {MAX_ALTERNATIVES} alternatives")
        elif keyword == "oneOf":
            alternatives = [self._written_out(each, (*here, str(index))) for index, each in enumerate(value)]
            plain[keyword] = [self._schema(each, at, depth + 1) for each, at in alternatives]
        elif keyword in SCHEMA_LISTS:
            plain[keyword] = plain.get(keyword, []) + self._schemas(value, here, depth)
        elif keyword == "additionalProperties":
            plain[keyword] = self._schema(value, here, depth + 1)
        elif keyword == "$ref":
            plain[keyword] = self._reference(value, where)
        elif keyword == "const":
            plain[keyword] = self._constant(value, here)
        elif keyword == "enum":
            plain[keyword] = [self._constant(each, here) for each in value]
        elif keyword == "pattern":
            plain[keyword] = _rust_pattern(value, where)
        elif keyword == "format":
            self._format(plain, value, where)
        elif keyword == "minProperties":
            self._min_properties(plain, schema, where)
        elif is_number(value):
            plain[keyword] = exact(where, keyword, value)
        else:
            plain[keyword] = value

    def _schemas(self, values: list[Any], place: Place, depth: int) -> list[Any]:
        return [self._schema(value, (*place, str(index)), depth + 1) for index, value in enumerate(values)]

    def _schema_map(
        self, plain: dict[str, Any], keyword: str, values: dict[str, Any], place: Place, depth: int
    ) -> None:
        where = shown_place(place)
        if keyword in ("$defs", "definitions"):
            for name in values:
                self._name_of((*place, name), where)
            return
        if len(values) > MAX_PROPERTIES:
            raise SchemaError(f"{where}: has {len(values)} properties, at most {MAX_PROPERTIES} are allowed")
        made: dict[str, Any] = {}
        for name, value in values.items():
            each = self._schema(value, (*place, name), depth + 1)
            if keyword == "patternProperties":
                name = _rust_pattern(name, where)
                each = {"allOf": [made[name], each]} if name in made else each  # two spellings of one pattern
            made[name] = each
        plain[keyword] = made

    def _items(self, plain: dict[str, Any], schema: dict[str, Any], keyword: str, place: Place, depth: int) -> None:
        value, here, where = schema[keyword], (*place, keyword), shown_place(place)
        if keyword == ("prefixItems" if self._is_old else "additionalItems"):
            raise SchemaError(f"{where}: the keyword {keyword} is not supported in this dialect (see $schema)")
        if keyword == "prefixItems":
            plain[keyword] = self._schemas(value, here, depth)
        elif keyword == "items" and isinstance(value, list) and self._is_old:
            plain["prefixItems"] = self._schemas(value, here, depth)
        elif keyword == "items" or isinstance(schema.get("items"), list):
            plain["items"] = self._schema(value, here, depth + 1)
        # Else additionalItems stands beside an items that says it all, and by the standard means nothing.

    def _format(self, plain: dict[str, Any], value: str, where: str) -> None:
        if value in PATTERNS:
            # A schema has one pattern, and the client's own may come, too.
            plain["allOf"] = [*plain.get("allOf", []), {"pattern": PATTERNS[value]}]
        elif value in NATIVE:
            plain["format"] = value
        else:
            raise SchemaError(f"{where}: the format {shown(value)} is not supported")

    def _min_properties(self, plain: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        least = schema["minProperties"]
        if least <= len(schema.get("required", ())):
            return  # always so
        if least > 1:
            raise SchemaError(
                f"{where}: minProperties {shown(least)} is not supported: above 1, required must name as many"
            )
        plain["minProperties"] = 1

    def _constant(self, value: Any, place: Place, depth: int = 1) -> Any:
        where = shown_place(place)
        if depth > MAX_DEPTH:
            raise SchemaError(f"{where}: is nested more than {MAX_DEPTH} deep")
        if isinstance(value, list):
            return [self._constant(each, place, depth + 1) for each in value]
        if isinstance(value, dict):
            return {name: self._constant(each, place, depth + 1) for name, each in value.items()}
        if is_number(value):
            return exact(where, place[-1], value)
        if isinstance(value, str) and (odd := [code for code in map(ord, value) if not is_writable(code)]):
            raise SchemaError(f"{where}: a string with U+{odd[0]:04X} is not supported")
        return value

    def _reference(self, reference: str, where: str) -> str:
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaError(f'{where}: only $ref within the schema ("#/...") is supported, got {shown(reference)}')
        steps = _steps(reference)
        return "#/$defs/" + self._name_of(steps, where) if steps else reference

    def _written_out(self, value: Any, place: Place) -> tuple[Any, Place]:
        """What a schema that is nothing but a ``$ref`` refers to, and where that stands."""
        if not isinstance(value, dict) or set(value) - set(ANNOTATIONS) != {"$ref"}:
            return value, place
        self._reference(value["$ref"], shown_place(place))
        target = _steps(value["$ref"])
        return self._target(target), target

    def _name_of(self, place: Place, where: str) -> str:
        """The name of a schema among ``$defs``; a new one is looked at later."""
        if place not in self._names:
            if len(self._names) >= MAX_TARGETS:
                raise SchemaError(f"{where}: there are more than {MAX_TARGETS} definitions")
            self._target(place, where)
            self._names[place] = f"target{len(self._names)}"
            self._pending.append(place)
        return self._names[place]

    def _target(self, place: Place, where: str = "$") -> Any:
        value = self._root
        for step in place:
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isascii() and step.isdigit() and int(step) < len(value):
                value = value[int(step)]
            else:
                raise SchemaError(f"{where}: $ref {shown('#/' + '/'.join(place))} points to nothing")
        return value


def _num_branches(alternatives: list[Any]) -> int:
    return sum(isinstance(each, (dict, list)) for each in alternatives)


def _steps(reference: str) -> Place:
    """The keys of a JSON pointer in a fragment."""
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in unquote(reference).split("/")[1:])


def _rust_pattern(pattern: str, where: str) -> str:
    try:
        return translated(pattern)
    except PatternError as error:
        raise SchemaError(f"{where}: pattern {shown(pattern)}: {error}") from None
