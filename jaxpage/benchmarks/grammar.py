"""``python -m jaxpage.benchmarks.grammar``: what structured output costs the host.

Measured, for some grammars and one model's tokenizer: the first compile and another one (from the cache), a matcher,
and a token: mask and accept, along texts that the grammar allows. Example:
    python -m jaxpage.benchmarks.grammar --model smollm2-135m-instruct --json grammar.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpage.benchmarks import report
from jaxpage.grammar import GrammarCompiler
from jaxpage.params import StructuredOutputsParams
from jaxpage.server.tools.definitions import Tools
from jaxpage.server.tools.strict import AnswerForm, strict_constraint
from jaxpage.tokenizer import Tokenizer
from jaxpage.weights import open_checkpoint, resolve_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "string", "format": "date"},
        "height_cm": {"type": "integer", "minimum": 30, "maximum": 250},
        "languages": {"type": "array", "items": {"enum": ["Deutsch", "English", "Français", "日本語"]}, "maxItems": 5},
        "address": {"$ref": "#/$defs/address"},
        "employer": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "born", "height_cm", "languages", "address", "employer"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        }
    },
}
PERSON_TEXT = json.dumps(
    {
        "name": "Ada Lovelace",
        "born": "1815-12-10",
        "height_cm": 165,
        "languages": ["English", "Français"],
        "address": {
            "street": "12 St James's Square, a house with a rather long description of its garden",
            "zip": "12345",
        },
        "employer": None,
    },
    ensure_ascii=False,
)
TOOL = {"type": "function", "function": {"name": "register", "parameters": PERSON, "strict": True}}
CALLS = strict_constraint(Tools((TOOL,), "auto"), AnswerForm("hermes", thinks=False, special_ids={}), False)
PROSE = (
    "Ada Lovelace was an English mathematician and writer, chiefly known for her work on the Analytical Engine. " * 3
)
CALL_TEXT = f'{PROSE[:107]}<tool_call>\n{{"name": "register", "arguments": {PERSON_TEXT}}}\n</tool_call>'
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"json": PERSON}, PERSON_TEXT),
    "json_object": ({"json_object": True}, PERSON_TEXT),
    "regex": ({"regex": r"[A-Z][a-z]+( [A-Z][a-z]+)*, [0-9]{4}-[0-9]{2}-[0-9]{2}"}, "Ada King Lovelace, 1815-12-10"),
    "choice": ({"choice": [f"label number {index}" for index in range(1000)]}, "label number 777"),
    "grammar": (
        {"grammar": 'root ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" root ")"'},
        "(12+(3*45)-6)*(789-(1+2))/3",
    ),
    "strict tool, text": ({"schema_grammar": CALLS.schema_grammar}, PROSE),
    "strict tool, call": ({"schema_grammar": CALLS.schema_grammar}, CALL_TEXT),
}
"""What is wanted, and a text that obeys it."""


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer")
    parser.add_argument("--rounds", type=int, default=20, help="times each text is followed")
    parser.add_argument("--json", help="file for the result")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds: must be at least 1")
    tokenizer = open_checkpoint(resolve_model(options.model), needs_weights=False).load_tokenizer()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    warm_up_ms = 1e3 * _seconds(lambda: compiler.compile(StructuredOutputsParams(regex="warm-up")))
    rows = [row(name, compiler, tokenizer, options.rounds) for name in CASES]
    print(report.table(rows))
    print(f"first grammar of a server (vocabulary, process for trials): {warm_up_ms:.0f} ms")
    for name, value in report.machine().items():
        print(f"{name}: {value}")
    settings = {"model": options.model, "rounds": options.rounds, "vocab_size": tokenizer.vocab_size}
    report.write(options.json, "grammar", rows, **settings, warm_up_ms=warm_up_ms)


def row(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer, rounds: int) -> dict[str, Any]:
    """The figures of one case."""
    wanted, text = CASES[name]
    params = StructuredOutputsParams(**wanted)
    compile_ms = 1e3 * _seconds(lambda: compiler.compile(params))
    again_us = 1e6 * min(_seconds(lambda: compiler.compile(params)) for _ in range(rounds))
    compiled = compiler.compile(params)
    matcher_us = 1e6 * statistics.median(_seconds(compiled.matcher) for _ in range(rounds))
    ids = tokenizer.encode(text, add_special_tokens=False)
    words = np.empty(-(-tokenizer.vocab_size // 32), np.int32)
    masks: list[float] = []
    accepts: list[float] = []
    for _ in range(rounds):
        matcher = compiled.matcher()
        for token_id in ids:
            words[:] = -1
            masks.append(_seconds(lambda matcher=matcher: matcher.mask(words)))
            if not words[token_id >> 5] >> (token_id & 31) & 1:
                raise RuntimeError(f"{name}: the text is not what the grammar says")
            accepts.append(_seconds(lambda matcher=matcher, token_id=token_id: matcher.accept(token_id)))
    return {
        "grammar": name,
        "compile ms": compile_ms,
        "again us": again_us,
        "matcher us": matcher_us,
        "tokens": len(ids),
        "mask us": 1e6 * statistics.fmean(masks),
        "mask p99 us": 1e6 * float(np.percentile(masks, 99)),
        "accept us": 1e6 * statistics.fmean(accepts),
    }


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
