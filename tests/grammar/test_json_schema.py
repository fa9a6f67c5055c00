"""What a JSON schema may say, and what is refused by name."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from following import grammar, writes
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.errors import ParameterError
from jaxpage.grammar import GrammarCompiler
from jaxpage.grammar.json_schema import MAX_DEPTH, normalized
from jaxpage.grammar.schema_keywords import SchemaError

Schema = Any


def refusal(compiler: GrammarCompiler, schema: Schema) -> str:
    with pytest.raises(ParameterError) as caught:
        grammar(compiler, json=schema)
    assert caught.value.parameter == "structured_outputs.json"
    assert "\n" not in caught.value.reason
    assert len(caught.value.reason) < 500
    return caught.value.reason


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "properties": {"name": "text"}}, "properties.name"),
        ({"type": "strange"}, "type"),
        ("", "not JSON"),
        ("{", "not JSON"),
        ("5", "schema"),
        ("[]", "schema"),
        ('{"minimum": NaN}', "NaN"),
        ({"enum": []}, "enum"),
        ({"enum": "a"}, "enum"),
        ({"type": "string", "pattern": "[a"}, "pattern"),
        ({"type": "string", "pattern": "(a"}, "regex"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"type": "integer", "minimum": "low"}, "minimum"),
        ({"required": "a"}, "required"),
        ({"required": ["a", "a"]}, "required"),
        ({"minLength": -1}, "minLength"),
        ({"maxItems": 1.5}, "maxItems"),
        ({"maxLength": 10**12}, "maxLength"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"title": 5}, "title"),
        ({"items": [{}]}, "items"),
        ({"anyOf": []}, "anyOf"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "$schema"),
        ({"properties": {"a\ud83d": {}}}, "surrogate"),
    ],
)
def test_so_1_schemas_that_do_not_compile(schema: Schema, named: str, compiler: GrammarCompiler) -> None:
    assert named in refusal(compiler, schema)


@pytest.mark.parametrize(
    "keyword",
    [
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
        "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
        "$dynamicRef", "$recursiveRef", "contentSchema", "nullable", "x-guidance", "foo",
    ],
)  # fmt: skip
def test_so_1b_unsupported_keywords_are_named(keyword: str, compiler: GrammarCompiler) -> None:
    for schema in ({keyword: {}}, {"type": "array", "items": {"anyOf": [{"type": "null"}, {keyword: True}]}}):
        assert repr(keyword) in refusal(compiler, schema)
    assert repr(keyword) in refusal(compiler, {"$defs": {"unused": {keyword: 1}}})


BAD_PATTERN = {"type": "string", "pattern": "a{3,1}"}
VAGUE = {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": BAD_PATTERN}}, "$.properties.a: malformed regex: invalid repetition"),
        ({"items": {"anyOf": [{"type": "null"}, BAD_PATTERN]}}, "$.items.anyOf.1: malformed regex"),
        ({"$defs": {"x": {"items": BAD_PATTERN}}, "$ref": "#/$defs/x"}, "$.$defs.x.items: malformed regex"),
        ({"patternProperties": {"(": {}}}, "$: malformed regex: unclosed group"),
        ({"properties": {"a": VAGUE, "b": {}}}, "$.properties.a: oneOf is only supported"),
        ({"prefixItems": [{}, {"items": VAGUE}]}, "$.prefixItems.1.items: oneOf is only supported"),
        (VAGUE, "$: oneOf is only supported"),
        ({"properties": {"a": {"exclusiveMinimum": 0, "maximum": 0.5}}}, "$.properties.a: exclusiveMinimum with"),
        ({"properties": {"a": {"$ref": "#/x"}}}, "$.properties.a: $ref '#/x' points to nothing"),
        ({"items": {"$ref": "#/items"}, "minItems": 1}, "$.items: $ref: a value would need another one"),
    ],
)
def test_so_1_messages_name_the_place(schema: Schema, place: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(ParameterError) as caught:
        grammar(compiler, json=schema)
    assert caught.value.reason.startswith(place)


def test_so_1b_references_are_never_fetched(compiler: GrammarCompiler) -> None:
    for reference in ("http://127.0.0.1:9/x.json", "other.json#/$defs/a", "#name", ""):
        assert "$ref" in refusal(compiler, {"$ref": reference})


def test_so_1b_annotations_pass(compiler: GrammarCompiler) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/a",
        "title": "T",
        "description": "D",
        "default": 5,
        "examples": ["x"],
        "$comment": "C",
        "deprecated": True,
        "readOnly": False,
        "writeOnly": False,
        "contentMediaType": "text/plain",
        "type": "string",
        "maxLength": 1,
    }
    assert writes(grammar(compiler, json=schema), '"a"')


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 2},
        {"type": "string", "enum": [1]},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "string", "pattern": "^\\x01$"},
        {"type": "object", "properties": {"a": {"pattern": "^[]$", "type": "string"}}, "required": ["a"]},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
    ],
)
def test_so_1_empty_languages(schema: Schema, compiler: GrammarCompiler) -> None:
    assert "no value matches" in refusal(compiler, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
        # Optional, and once begun without an end.
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1}}},  # noqa: E501
    ],
)  # fmt: skip
def test_so_3a_values_that_never_end_are_refused(schema: Schema, compiler: GrammarCompiler) -> None:
    assert "without end" in refusal(compiler, schema)


def test_recursion_with_an_end(compiler: GrammarCompiler) -> None:
    tree = {
        "$defs": {"tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}},  # noqa: E501
        "anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}],
    }  # fmt: skip
    compiled = grammar(compiler, json=tree)
    assert writes(compiled, '{"next": {"next": {}}}')
    assert writes(compiled, "null")
    assert not writes(compiled, '{"next": null}')


@pytest.mark.parametrize("wrap", [lambda x: {"type": "array", "items": x}, lambda x: {"properties": {"a": x}}])
def test_so_1_nesting_of_64_and_not_more(wrap: Any, compiler: GrammarCompiler) -> None:
    schema: Schema = {"type": "null"}
    for _ in range(MAX_DEPTH - 1):
        schema = wrap(schema)
    grammar(compiler, json=schema)
    assert "nested" in refusal(compiler, wrap(schema))
    for _ in range(3000):
        schema = wrap(schema)
    assert refusal(compiler, schema)


def test_sizes_are_bounded(compiler: GrammarCompiler) -> None:
    assert "properties" in refusal(compiler, {"properties": {f"p{index}": {} for index in range(1001)}})
    assert "alternatives" in refusal(compiler, {"anyOf": [{"maxLength": index} for index in range(1001)]})
    assert "characters" in refusal(compiler, {"description": "x" * 600_000})
    assert "schemas are more than" in refusal(compiler, {"allOf": [{"title": "x"}] * 20_001})
    assert grammar(compiler, json={"enum": [f"value {index}" for index in range(5000)]})


def test_one_spelling_for_a_name(compiler: GrammarCompiler) -> None:
    """Else an escape would let a named property come again with any value."""
    compiled = grammar(compiler, json={"properties": {"a": {"type": "integer"}}})
    assert writes(compiled, '{"a": 1, "b": "x"}')
    for text in ('{"a":1,"a":"x"}', '{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}', '{"a":"x"}'):
        assert not writes(compiled, text)


def test_numbers_that_doubles_cannot_tell_apart_are_refused(compiler: GrammarCompiler) -> None:
    for schema in ({"const": 2**53 + 1}, {"enum": [1, -(2**60)]}, {"minimum": 1e300}, {"maximum": 2**53 + 1}):
        assert "2^53" in refusal(compiler, schema)
    compiled = grammar(compiler, json={"const": 2**53})
    assert writes(compiled, str(2**53))
    assert not writes(compiled, str(2**53 + 1))


def test_open_intervals_within_one_integer_are_refused(compiler: GrammarCompiler) -> None:
    assert "exclusiveMinimum" in refusal(compiler, {"exclusiveMinimum": 0, "maximum": 0.5})
    assert "exclusiveMaximum" in refusal(compiler, {"exclusiveMaximum": -2, "minimum": -2.5})
    assert "exclusiveMinimum" in refusal(compiler, {"exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}]})
    assert "multipleOf" in refusal(compiler, {"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]})
    apart = {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}}
    assert grammar(compiler, json=apart)
    compiled = grammar(compiler, json={"type": "number", "exclusiveMinimum": 0, "maximum": 1})
    texts = ("0", "0.0", "-0", "0.01", "1", "1.0", "1.1")
    assert [writes(compiled, text) for text in texts] == [False, False, False, True, True, True, False]


@given(
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    st.decimals(-30, 30, places=2),
    st.decimals(0, 3, places=2),
    st.sampled_from(["number", "integer"]),
)
def test_bounds(compiler: GrammarCompiler, low: str, high: str, start: Decimal, width: Decimal, kind: str) -> None:
    end = start + width
    schema = {"type": kind, low: float(start), high: float(end)}
    try:
        compiled = grammar(compiler, json=schema)
    except ParameterError:
        return
    validator = jsonschema.Draft202012Validator({low: start, high: end})
    for centre in (start, end, Decimal(0), Decimal(round(start))):
        for step in ("0", "0.01", "0.001", "1", "0.1"):
            for value in (centre + Decimal(step), centre - Decimal(step)):
                for text in {f"{value:f}", f"{value.normalize():f}", f"-{abs(value):f}"}:
                    number = Decimal(text)
                    is_valid = validator.is_valid(number) and (kind == "number" or number % 1 == 0)
                    assert is_valid or not writes(compiled, text), (schema, text)


def test_min_properties(compiler: GrammarCompiler) -> None:
    assert "minProperties" in refusal(compiler, {"minProperties": 2})
    some = grammar(compiler, json={"type": "object", "minProperties": 1})
    assert writes(some, '{"a": 1}')
    assert not writes(some, "{}")
    assert grammar(compiler, json={"type": "object", "required": ["a", "b"], "minProperties": 2})


def test_tuples_of_older_dialects(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "string"}}
    compiled = grammar(compiler, json={"$schema": "http://json-schema.org/draft-07/schema#"} | schema)
    assert [writes(compiled, text) for text in ('[1,"a"]', "[1,2]", '["a"]', "[]")] == [True, False, False, True]
    assert "items" in refusal(compiler, schema)
    old = {"$schema": "http://json-schema.org/draft-07/schema", "prefixItems": [{}]}
    assert "prefixItems" in refusal(compiler, old)


def test_tagged_unions_as_pydantic_writes_them(compiler: GrammarCompiler) -> None:
    def kind(name: str) -> Schema:
        properties = {"kind": {"const": name, "type": "string"}, "size": {"type": "integer"}}
        return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}

    union = {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {}},
        "$defs": {"Cat": kind("cat"), "Dog": kind("dog")},
    }
    compiled = grammar(compiler, json=union)
    assert writes(compiled, '{"kind":"cat","size":3}')
    assert writes(compiled, '{"kind":"dog"}')
    assert not writes(compiled, '{"kind":"cow"}')
    assert "oneOf" in refusal(compiler, {"oneOf": [{"minimum": 1}, {"maximum": 5}]})


def test_two_spellings_of_one_pattern_both_count(compiler: GrammarCompiler) -> None:
    schema = {"patternProperties": {"^a": {"type": "integer"}, "^\\x61": {"maximum": 5}}}
    compiled = grammar(compiler, json=schema)
    assert writes(compiled, '{"a": 5}')
    assert not writes(compiled, '{"a": 6}')
    assert not writes(compiled, '{"a": "x"}')


def test_order_of_keywords_does_not_matter(compiler: GrammarCompiler) -> None:
    parts = {"patternProperties": {"^x": {}}, "allOf": [{"required": ["a"]}], "additionalProperties": False, "properties": {"a": {}}}  # fmt: skip # noqa: E501
    for schema in (parts, dict(reversed(parts.items()))):
        compiled = grammar(compiler, json=schema)
        assert writes(compiled, '{"a":1,"x":1}')
        assert not writes(compiled, '{"a":1,"y":1}')


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.sampled_from(["", "a", "string", "[", "^a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "type", "minimum"]), inner),
    max_leaves=4,
)
_KEYWORDS = (
    "type", "enum", "const", "minimum", "maxLength", "minItems", "pattern", "format", "required", "properties", "items",
    "prefixItems", "anyOf", "allOf", "additionalProperties", "patternProperties", "multipleOf", "title", "default",
    "examples", "$defs", "$comment", "readOnly", "maxProperties", "exclusiveMinimum",
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(_KEYWORDS), _VALUES, max_size=3))
def test_so_1_what_the_standard_calls_malformed_is_refused(schema: dict[str, Any]) -> None:
    try:
        jsonschema.Draft202012Validator.check_schema(schema, format_checker=jsonschema.FormatChecker(()))
    except jsonschema.SchemaError:
        with pytest.raises(SchemaError):
            normalized(json.loads(json.dumps(schema)))
