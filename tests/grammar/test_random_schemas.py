"""Random schemas and a model whose logits are random: what comes out obeys, however keywords are combined."""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import jsonschema
from following import grammar, walk
from hypothesis import given
from hypothesis import strategies as st
from test_random_logits import number, random_walk

from jaxpage.errors import ParameterError
from jaxpage.grammar import GrammarCompiler
from jaxpage.tokenizer import Tokenizer

MAX_TOKENS = 150
NAMES = st.sampled_from(["a", "b", "ab", "é"])
COUNTS = st.integers(0, 3)
NUMBERS = st.integers(-5, 5) | st.sampled_from([0.5, -1.25, 2.75, 0.0])
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "a", "é", "ab", "x\n"])
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
LEAVES: dict[str, st.SearchStrategy[Any]] = {
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
    "enum": st.lists(SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(NAMES, SCALARS, max_size=2), min_size=1, max_size=3),  # noqa: E501
    "const": SCALARS,
    "minimum": NUMBERS,
    "maximum": NUMBERS,
    "exclusiveMinimum": NUMBERS,
    "exclusiveMaximum": NUMBERS,
    "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.25]),
    "minLength": COUNTS,
    "maxLength": COUNTS,
    "pattern": st.sampled_from(["a", "^a", "b$", "^[ab]*$", "^.{2}$", "é|x"]),
    "minItems": COUNTS,
    "maxItems": COUNTS,
    "minProperties": COUNTS,
    "maxProperties": COUNTS,
    "required": st.lists(NAMES, max_size=2, unique=True),
}  # fmt: skip


def object_of(strategies: dict[str, st.SearchStrategy[Any]], max_size: int) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of the keys, in any order."""
    names = st.lists(st.sampled_from(sorted(strategies)), max_size=max_size, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: strategies[name] for name in chosen}))


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    return object_of(
        LEAVES
        | {
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b", "^é$"]), inner, max_size=2),
            "additionalProperties": inner,
            "items": inner,
            "prefixItems": some,
            "anyOf": some,
            "oneOf": some,
            "allOf": some,
            "$ref": st.sampled_from(["#/$defs/a", "#/$defs/b"]),
        },
        5,
    )


SCHEMAS = st.recursive(st.booleans() | object_of(LEAVES, 3), deeper, max_leaves=6)
WHOLE = st.tuples(deeper(SCHEMAS), st.fixed_dictionaries({"a": SCHEMAS, "b": SCHEMAS}))


@given(WHOLE, st.integers(0, 2**32))
def test_whatever_is_finished_validates(
    compiler: GrammarCompiler, bytes_tokenizer: Tokenizer, parts: tuple[dict[str, Any], dict[str, Any]], seed: int
) -> None:
    schema = parts[0] | {"$defs": parts[1]}
    try:
        compiled = grammar(compiler, json=schema)
    except ParameterError as error:
        assert error.parameter == "structured_outputs.json"
        return
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = jsonschema.Draft202012Validator(exact)
    for attempt in range(4):
        ids, has_ended = walk(compiled, random_walk(seed + attempt, 1.0 + attempt), MAX_TOKENS)
        if not has_ended:
            continue
        value = json.loads(b"".join(map(bytes_tokenizer.token_bytes, ids)), parse_float=number)
        with localcontext(prec=2 * MAX_TOKENS):
            try:
                errors = list(validator.iter_errors(value))
            except InvalidOperation:  # whether 1e999 is a multiple of something is too much for it
                continue
        assert not errors, (schema, value, errors[0].message)
