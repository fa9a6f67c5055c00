"""A model whose logits are random: whatever it finishes obeys its schema, by jsonschema's judgement."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import jsonschema
import pytest
from following import BYTES_END, grammar, walk
from hypothesis_profiles import is_nightly

from jaxpage.grammar import GrammarCompiler
from jaxpage.tokenizer import Tokenizer

WALKS = 200 if is_nightly else 6
MAX_TOKENS = 600
SCHEMAS: dict[str, Any] = {
    "type": {"type": ["object", "array", "string", "number", "integer", "boolean", "null"]},
    "anything": {},
    "boolean schema": {"properties": {"a": True, "b": False}, "type": "object"},
    "properties": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "required": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "é"]},
    "additionalProperties": {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "number"}},
    "patternProperties": {"type": "object", "patternProperties": {"^x": {"type": "integer"}, "^y": {"type": "null"}}},
    "minProperties": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
    "maxProperties": {"type": "object", "maxProperties": 2, "additionalProperties": {"type": "integer"}},
    "items": {"type": "array", "items": {"type": "boolean"}},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    "minItems": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    "maxItems": {"type": "array", "items": {"type": "null"}, "maxItems": 3},
    "minLength": {"type": "string", "minLength": 3},
    "maxLength": {"type": "string", "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-cé]+-[0-9]{2}$"},
    "pattern, unanchored": {"type": "string", "pattern": "x[^y]", "maxLength": 12},
    "minimum": {"type": "number", "minimum": -1.25},
    "maximum": {"type": "integer", "maximum": 12, "minimum": -300},
    "exclusiveMinimum": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "exclusive bounds": {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0.75},
    "exclusiveMaximum": {"type": "integer", "exclusiveMaximum": 7},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "multipleOf, fractions": {"type": "number", "multipleOf": 0.25, "minimum": -10},
    "enum": {"enum": ["夏目", "🐈", 5, -2.5, None, [1, {"a": "b"}], {"x": [True]}]},
    "const": {"const": {"naïve": ['a"b\\c\n', 1.5]}},
    "anyOf": {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string", "maxLength": 2}]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "array", "items": {"type": "null"}}]},
    "allOf": {"allOf": [{"properties": {"a": {"minimum": 1}}, "required": ["a"]}, {"properties": {"a": {"type": "integer"}}}], "type": "object"},  # noqa: E501
    "$ref": {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}, "$ref": "#/$defs/t"},
    "$ref beside others": {"$defs": {"t": {"type": "integer"}}, "$ref": "#/$defs/t", "minimum": 3, "maximum": 99},
    **{f"format {name}": {"type": "string", "format": name} for name in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")},  # noqa: E501
    "default": {"type": "object", "properties": {"a": {"type": "integer", "default": []}}, "required": ["a"]},
}  # fmt: skip


def number(text: str) -> Decimal | float:
    """Exact where that is possible: an exponent may be anything."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def random_walk(seed: int, end_bias: float) -> Callable[[Sequence[int], int], int]:
    """Uniform over what is allowed; ever more for the end and for what leads to it, so that walks end."""
    generator = random.Random(seed)
    closing = {*b'"}]', BYTES_END}

    def choose(ids: Sequence[int], position: int) -> int:
        near = [each for each in ids if each in closing]
        if near and generator.random() < end_bias * position / 50:
            return BYTES_END if BYTES_END in near else generator.choice(near)
        return generator.choice(ids)

    return choose


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_finished_output_validates(name: str, compiler: GrammarCompiler, bytes_tokenizer: Tokenizer) -> None:
    schema = SCHEMAS[name]
    compiled = grammar(compiler, json=schema)
    # Decimals: 2.675 is a multiple of 0.005, and not of the double beside it.
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = jsonschema.Draft202012Validator(exact, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    num_finished = 0
    for seed in range(WALKS):
        ids, has_ended = walk(compiled, random_walk(seed, 0.2 + seed % 3), MAX_TOKENS)
        if not has_ended:
            continue
        num_finished += 1
        value = json.loads(b"".join(map(bytes_tokenizer.token_bytes, ids)).decode(), parse_float=number)
        with localcontext(prec=2 * MAX_TOKENS):
            validator.validate(value)
    assert num_finished > 0


def test_json_object_is_an_object(compiler: GrammarCompiler, bytes_tokenizer: Tokenizer) -> None:
    compiled = grammar(compiler, json_object=True)
    for seed in range(WALKS):
        ids, has_ended = walk(compiled, random_walk(seed, 1.0), MAX_TOKENS)
        if has_ended:
            assert isinstance(json.loads(b"".join(map(bytes_tokenizer.token_bytes, ids))), dict)
