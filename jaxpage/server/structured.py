"""Owns the fields that say what the text has to be: OpenAI's, vLLM's, and the names vLLM had for its own before.

It must not know grammars: whether a schema compiles is found out where prompts are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpage.checks import check_bool
from jaxpage.errors import ParameterError, shown
from jaxpage.params import StructuredOutputsParams
from jaxpage.server.fields import Body, check_object, check_str, field

KINDS = ("json", "regex", "choice", "grammar", "json_object")
GUIDED_KINDS = ("json", "regex", "choice", "grammar")
"""What follows ``guided_`` in the old names."""

_REFUSED_OPTIONS = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
"""vLLM's further keys of ``structured_outputs`` that would change the text."""


class StructuredField(NamedTuple):
    """A constraint and the dotted path under which the client gave it."""

    name: str
    params: StructuredOutputsParams


def structured_field(body: Body) -> StructuredField | None:
    """The constraint that a body asks for; None: free text.

    Raises:
        ParameterError: for a malformed one, or more than one.
    """
    found = [*_from_response_format(body), *_from_structured_outputs(body), *_from_guided(body)]
    if len(found) > 1:
        first, second = (each.name.split(".")[0] for each in found[:2])
        raise ParameterError(second, f"cannot be combined with {first}")
    return found[0] if found else None


def _from_response_format(body: Body) -> list[StructuredField]:
    given = field(body, "response_format", check_object)
    if given is None:
        return []
    kind = given.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [_made("response_format", "json_object", True)]
    if kind != "json_schema":
        raise ParameterError(
            "response_format.type", f'must be "text", "json_object" or "json_schema", got {shown(kind)}'
        )
    where = "response_format.json_schema"
    described = _needed(given, "json_schema", where)
    if not _text(described, "name", where):
        raise ParameterError(f"{where}.name", "must be a non-empty string")
    _text(described, "description", where)
    if described.get("strict") is not None:
        check_bool(f"{where}.strict", described["strict"])
    return [_made(f"{where}.schema", "json", _needed(described, "schema", f"{where}.schema"))]


def _from_structured_outputs(body: Body) -> list[StructuredField]:
    given = field(body, "structured_outputs", check_object)
    if given is None:
        return []
    for name in _REFUSED_OPTIONS:
        if given.get(name):
            raise ParameterError(f"structured_outputs.{name}", f"is not supported, got {shown(given[name])}")
    if given.get("json_object") is not None:
        check_bool("structured_outputs.json_object", given["json_object"])
    kinds = [kind for kind in KINDS if given.get(kind) is not None and (kind, given[kind]) != ("json_object", False)]
    if len(kinds) != 1:
        raise ParameterError(
            "structured_outputs", f"needs exactly one of {', '.join(KINDS)}, got {', '.join(kinds) or 'none'}"
        )
    return [_made(f"structured_outputs.{kinds[0]}", kinds[0], given[kinds[0]])]


def _from_guided(body: Body) -> list[StructuredField]:
    if body.get("guided_whitespace_pattern") is not None:
        raise ParameterError(
            "guided_whitespace_pattern", f"is not supported, got {shown(body['guided_whitespace_pattern'])}"
        )
    return [
        _made(f"guided_{kind}", kind, body[f"guided_{kind}"])
        for kind in GUIDED_KINDS
        if body.get(f"guided_{kind}") is not None
    ]


def _made(name: str, kind: str, value: Any) -> StructuredField:
    if kind == "json" and (not isinstance(value, (str, dict, bool)) or value == ""):
        raise ParameterError(name, f"must be a JSON schema, as an object or as its text, got {shown(value)}")
    fields: dict[str, Any] = {kind: value}
    try:
        return StructuredField(name, StructuredOutputsParams(**fields))
    except ParameterError as error:
        raise ParameterError(name, error.reason) from None


def _needed(given: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    if given.get(name) is None:
        raise ParameterError(where, "is missing")
    return check_object(where, given[name])


def _text(given: Mapping[str, Any], name: str, where: str) -> str | None:
    value = given.get(name)
    return None if value is None else check_str(f"{where}.{name}", value)
