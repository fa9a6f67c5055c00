"""Owns the step from what a client asks for to the text of a grammar in llguidance's dialect of Lark.

It must not know tokens, caches or threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxpage.errors import ParameterError
from jaxpage.grammar.json_schema import normalized
from jaxpage.grammar.schema_blame import blamed
from jaxpage.grammar.schema_keywords import Place, SchemaError, shown_place
from jaxpage.params import StructuredOutputsParams

MAX_CHARACTERS: Final = {
    "json": 512 * 1024,
    "choice": 512 * 1024,
    "regex": 64 * 1024,
    "grammar": 64 * 1024,
    "schema_grammar": 512 * 1024,
}

_OPTIONS: Final = '\n%llguidance {"no_forcing": true}\n'
"""The model chooses how to cut forced text into tokens; llguidance would ask our tokenizer, in the middle of a step.
They stand at the end, so that a client's grammar keeps its lines in messages."""

_GBNF_RULE: Final = re.compile(r"(?m)^\s*[\w-]+\s*::=")

_JSON_OPTIONS: Final = {
    # Blanks: one at most, after a comma or a colon. A model that loves them cannot get lost in them.
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    # No \u: each string has one spelling, so a map cannot repeat a named property under another spelling of its name.
    "json_allowed_escapes": 'nrbtf\\"',
}

_JSON_OBJECT: Final = r"""start: object
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" (member (COMMA member)*)? "}"
member: STRING COLON value
array: "[" (value (COMMA value)*)? "]"
COMMA: /, ?/
COLON: /: ?/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
STRING: /"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u(BMP|PAIR))*"/
"""
_BMP: Final = "[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
_PAIR: Final = r"[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"


def source_of(params: StructuredOutputsParams) -> tuple[str, str]:
    """The field that is set and its value as text; equal texts mean equal grammars.

    Raises:
        ParameterError: if the value is no JSON, or too long.
    """
    if params.json_object:
        return "json_object", ""
    if params.json is not None:
        kind, text = "json", params.json if isinstance(params.json, str) else _json_text(params.json)
    elif params.choice is not None:
        kind, text = "choice", _json_text(list(params.choice))
    elif params.regex is not None:
        kind, text = "regex", params.regex
    elif params.schema_grammar is not None:
        wanted = params.schema_grammar
        kind, text = "schema_grammar", _json_text([wanted.grammar, list(wanted.schemas)])
    else:
        kind, text = "grammar", params.grammar or ""
    if len(text) > MAX_CHARACTERS[kind]:
        raise ParameterError(name_of(kind), f"has {len(text)} characters, at most {MAX_CHARACTERS[kind]} are allowed")
    return kind, text


def is_lark(kind: str, text: str) -> bool:
    """Whether a grammar is taken as it is."""
    return kind == "grammar" and not _GBNF_RULE.search(text)


def name_of(kind: str) -> str:
    """The parameter's dotted name, for messages."""
    return f"structured_outputs.{kind}"


def grammar_text(kind: str, text: str) -> str:
    """The grammar for what ``source_of`` gave.

    Raises:
        ParameterError: for a text that is malformed or asks for something that is not supported.
    """
    try:
        text.encode()
        if kind == "choice":
            "".join(json.loads(text)).encode()
        return _MAKERS[kind](text) + _OPTIONS
    except UnicodeEncodeError:
        raise ParameterError(name_of(kind), "holds half of a surrogate pair") from None
    except SchemaError as error:
        raise ParameterError(name_of(kind), str(error)) from None
    except RecursionError:
        raise ParameterError(name_of(kind), "is nested too deeply") from None


def _json_text(value: Any) -> str:
    """The value as JSON in one spelling.

    Raises:
        ParameterError: if it is none.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(name_of("json"), f"is not a JSON schema: {str(error)[:200]}") from None


def _from_schema(text: str, place: Place = ()) -> str:
    return "start: " + _json_rule(text, place)


def with_place(text: str, reason: str, refusal: Callable[[str], str | None]) -> str:
    """``reason``, for which a schema does not compile, with the place in the schema in front.

    Args:
        refusal: why a grammar does not compile; None if it does.
    """
    place = blamed(json.loads(text), reason, lambda place: refusal(_from_schema(text, place) + _OPTIONS))
    return f"{shown_place(place)}: {reason}"


def _from_schema_grammar(text: str) -> str:
    grammar, schemas = json.loads(text)
    _refuse_json(grammar, "schema_grammar")
    rules = [f"schema_{index}: {_json_rule(json.dumps(schema))}" for index, schema in enumerate(schemas)]
    return "\n".join([grammar, *rules])


def _json_rule(text: str, place: Place = ()) -> str:
    def refuse(literal: str) -> None:
        raise SchemaError(f"{literal} is no JSON number")

    try:
        schema = json.loads(text, parse_constant=refuse)
    except SchemaError:
        raise
    except ValueError as error:
        raise SchemaError(f"is not JSON: {str(error)[:200]}") from None
    whole = {"x-guidance": _JSON_OPTIONS} | normalized(schema, place)
    json.dumps(whole, ensure_ascii=False).encode()  # escapes can hide half of a surrogate pair
    return "%json " + json.dumps(whole)


def _from_regex(text: str) -> str:
    return f"start: /{llguidance.regex_to_lark(text, '')}/"


def _from_choice(text: str) -> str:
    # JSON's escapes in ASCII are Lark's, too.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in dict.fromkeys(json.loads(text)))


def _from_grammar(text: str) -> str:
    """Lark as it is; GBNF, which has ``::=`` where Lark has ``:``, translated."""
    _refuse_json(text, "grammar")
    if is_lark("grammar", text):
        return text
    try:
        return gbnf_to_lark(re.sub(r"\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}", _plain_escape, text))
    except RecursionError:
        raise
    except Exception as error:  # the converter raises bare Exception, too
        raise ParameterError(name_of("grammar"), " ".join(str(error).split())[:200]) from None


def _refuse_json(grammar: str, kind: str) -> None:
    if "%json" in grammar:  # llguidance would ignore the keywords it does not know
        raise ParameterError(name_of(kind), "%json is not supported inside of a grammar")


def _plain_escape(match: re.Match[str]) -> str:
    """A GBNF escape for a character beyond ASCII as that character; llguidance's converter garbles such escapes."""
    code = int(match[0][2:], 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else match[0]


def _from_nothing(text: str) -> str:
    return _JSON_OBJECT.replace("BMP", _BMP).replace("PAIR", _PAIR)


_MAKERS: Final[dict[str, Callable[[str], str]]] = {
    "json": _from_schema,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "schema_grammar": _from_schema_grammar,
    "json_object": _from_nothing,
}


def reason_of(message: str, lines_count: bool = False) -> str:
    """llguidance's message in one line, without its state, source excerpts, stack traces, and names of ours.

    ``lines_count``: the grammar's lines are those of the client.
    """
    if message.startswith("panic") or re.search(r"limits?\.|too (big|large)", message):
        return "is too large or too deeply nested"
    if message.startswith("NoExtension"):
        return "no text matches it"
    if "oneOf constraints are not supported" in message:
        return "oneOf is only supported if its alternatives exclude each other by type or by a constant property"
    head = re.split(r"\n<state>|<backtrace>|\n\s*\d+ \||\s+while processing json-schema:", message)[0]
    head = re.sub(r"(?s)^.*\nerror: ", "malformed regex: ", head)
    head = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: " if lines_count else "", head)
    head = re.sub(r"^(failed to compile JSON schema: )?(Unsatisfiable schema: )?", _short, head)
    return " ".join(head.split())[:300]


def _short(match: re.Match[str]) -> str:
    return "no value matches it: " if match[2] else ""
