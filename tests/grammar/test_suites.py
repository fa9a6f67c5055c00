"""Two public suites as judges of what the grammars accept."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from following import may_write, writes
from hypothesis_profiles import is_nightly

from jaxpage.errors import ParameterError
from jaxpage.grammar import GrammarCompiler
from jaxpage.params import StructuredOutputsParams
from jaxpage.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
SUITE = DATA / "json_schema_test_suite"
PARSING = json.loads((DATA / "json_parsing_test_suite" / "json_parsing_cases.json").read_text(encoding="utf-8"))
REFUSED = {
    "propertyNames", "dependentSchemas", "unevaluatedProperties", "schema is false", "enum must be", "U+0000",
    "oneOf is only", "multipleOf",
}  # fmt: skip
NARROWER = {("type.json", "1.0")}
"""Valid texts of a type that the schema names that are not written: the integer 1 is, but not with a fraction."""


def spellings(value: Any, every: bool) -> set[str]:
    """JSON texts of a value; every: also with escapes in place of characters outside ASCII."""
    texts = {json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":"))}
    return texts | {json.dumps(value)} if every else texts


def raw_enough(text: str) -> bool:
    """Without what generated strings do not hold: escapes with u."""
    return "\\u" not in text


@pytest.mark.parametrize("file", sorted(path.name for path in SUITE.glob("*.json")))
def test_so_1c_and_so_1b_json_schema_suite_by_bytes(file: str, compiler: GrammarCompiler) -> None:
    for group in json.loads((SUITE / file).read_text(encoding="utf-8")):
        try:
            compiled = compiler.compile(StructuredOutputsParams(json=group["schema"]))
        except ParameterError as error:
            assert error.parameter == "structured_outputs.json"
            assert any(reason in error.reason for reason in REFUSED), (group["description"], error.reason)
            continue
        schema = group["schema"]
        named = schema.get("type") if isinstance(schema, dict) else None
        for test in group["tests"]:
            for text in spellings(test["data"], every=True):
                is_written = writes(compiled, text)
                assert test["valid"] or not is_written, (group["description"], text)
                is_expected = test["valid"] and named is not None and raw_enough(text)
                if is_expected and (file, text) not in NARROWER:
                    assert is_written, (group["description"], text)


def test_so_1c_json_schema_suite_by_the_tokens_of_smollm2(smol: tuple[Tokenizer, GrammarCompiler]) -> None:
    tokenizer, compiler = smol
    files = sorted(SUITE.glob("*.json"))
    for file in files if is_nightly else files[::6]:
        for group in json.loads(file.read_text(encoding="utf-8")):
            try:
                compiled = compiler.compile(StructuredOutputsParams(json=group["schema"]))
            except ParameterError:
                continue
            for test in group["tests"]:
                ids = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False), add_special_tokens=False)
                is_written = may_write(compiled, ids, end=2, num_ids=tokenizer.vocab_size)
                assert test["valid"] or not is_written, (group["description"], test["data"])


def test_so_1c_json_object_and_the_parsing_suite(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(StructuredOutputsParams(json_object=True))
    num_accepted = 0
    for row in PARSING:
        raw = base64.b64decode(row["b64"])
        is_written = writes(compiled, raw)
        if row["expect"] == "reject":
            assert not is_written, row["name"]
        elif raw.strip().startswith(b"{"):
            # One blank at most after a comma or a colon; none elsewhere.
            value = json.dumps(json.loads(raw), ensure_ascii=False)
            assert is_written or "{ " in row["text"] or " }" in row["text"] or "{\n" in row["text"], row["name"]
            assert writes(compiled, value), row["name"]
            num_accepted += is_written
    assert num_accepted >= 8
    assert not writes(compiled, "[]")
    for opening in ("[" * 1000, '{"":' * 2000):
        assert not writes(compiled, opening)
