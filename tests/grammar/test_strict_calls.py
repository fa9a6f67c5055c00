"""Calls of strict tools where the model chooses: the grammar against the readers of the server."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from following import may_write, walk, writes

from jaxpage.errors import ParameterError
from jaxpage.grammar import CompiledGrammar, GrammarCompiler
from jaxpage.params import SchemaGrammar, StructuredOutputsParams
from jaxpage.server.chat_setup import TOOL_PARSERS
from jaxpage.server.reasoning import ThinkReader
from jaxpage.server.tools.definitions import Tools
from jaxpage.server.tools.parts import AnswerReader, joined
from jaxpage.server.tools.strict import AnswerForm, strict_constraint
from jaxpage.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
F = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
G = {"type": "function", "function": {"name": "g-1"}}
H = {"type": "function", "function": {"name": "h", "strict": True}}
CALL_F, CALL_G = '{"name": "f", "arguments": {"x": 1}}', '{"name":"g-1","parameters":{"y":[1,"z"]}}'
CALL_H = '{"type": "function", "name": "h", "parameters": {}}'
BAD = [
    '{"name": "f", "arguments": {"y"',
    '{"name": "k"',
    '{"arguments"',
    '{"name": "h", "arguments": {"',
    '{"id"',
    '{ "name": 5',
]
FORMATS = tuple(TOOL_PARSERS)


def compiled(
    compiler: GrammarCompiler,
    parser: str,
    *,
    parallel: bool = True,
    thinks: bool = False,
    opens: bool = False,
    special_ids: dict[str, int] | None = None,
) -> CompiledGrammar:
    form = AnswerForm(parser, thinks, special_ids or {})
    return compiler.compile(strict_constraint(Tools((F, G, H), "auto", None, parallel), form, opens))


def marked(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("parser", FORMATS)
def test_text_is_free(parser: str, compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, parser)
    for text in ["", "Hello", 'a {"name": 5}', "{", "{}", '{"city": "name"}', "[1, 2]", "<tool_", "<think>a", "日本"]:
        assert writes(grammar, text) == (text != "{" or parser == "hermes"), text  # "{" alone may become a call


def test_marked_calls_follow_their_schemas(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, "hermes")
    for call in (CALL_F, CALL_G, CALL_H):
        for text in (f"<tool_call>{call}</tool_call>", f"a{marked(call)} b{marked(CALL_F)}\nc", marked(call) * 3):
            assert writes(grammar, text), text
    for bad in (*BAD, "x", "[", "\n\n\n\n\n"):
        assert not writes(grammar, "<tool_call>" + bad), bad
        assert not writes(grammar, marked(CALL_F) + " and <tool_call>\n" + bad), bad
    assert not writes(grammar, "<tool_call>" + CALL_F), "the end of a call is no matter of taste"
    once = compiled(compiler, "hermes", parallel=False)
    assert writes(once, f"a {marked(CALL_F)} b <tool_cal")
    assert not writes(once, marked(CALL_F) + "<tool_call>")


@pytest.mark.parametrize("parser", ["json", "llama3_json"])
def test_bare_calls_follow_their_schemas(parser: str, compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, parser)
    separator = ";" if parser == "llama3_json" else ","
    for text in (
        CALL_F,
        CALL_H + " ok",
        f"[{CALL_F},\n {CALL_G}]",
        f"{CALL_G}{separator} {CALL_F}",
        CALL_F + '{"a": 1}',
    ):
        assert writes(grammar, text), text
    for bad in BAD:
        for before in ("", " [", CALL_F, CALL_G + separator):
            assert not writes(grammar, before + bad), before + bad
    once = compiled(compiler, parser, parallel=False)
    assert writes(once, f"[{CALL_F}] then")
    assert not writes(once, CALL_F + '{"name"')
    tag = "<|python_tag|>"
    assert writes(grammar, tag + CALL_F)
    assert writes(grammar, tag + BAD[0]) == (parser == "json"), "only one format knows the tag"


@pytest.mark.parametrize("parser", FORMATS)
def test_thoughts_are_free_and_the_answer_behind_them_is_not(parser: str, compiler: GrammarCompiler) -> None:
    call, bad = (marked(CALL_F), "<tool_call>" + BAD[0]) if parser == "hermes" else (CALL_F, BAD[0])
    for opens, opening in ((False, "\n<think>"), (True, "")):
        grammar = compiled(compiler, parser, thinks=True, opens=opens)
        for text in (
            "",
            f"{bad} hm",
            f"{bad}</think>",
            f"{bad}</think>\n{call}",
            "</think>\x1c <think>" + call,
            "</think>\n[1",
        ):
            assert writes(grammar, opening + text), text
        assert not writes(grammar, f"{opening}so</think>\x1c\n{bad}")
        assert writes(grammar, bad) == opens
    assert writes(compiled(compiler, parser, thinks=True), call)


def test_markers_that_are_special_tokens(compiler: GrammarCompiler) -> None:
    """Written as text they are markers, too; other special tokens are none of an answer."""
    ids = {"<tool_call>": 258, "</tool_call>": 259}
    grammar = compiled(compiler, "hermes", special_ids=ids)
    call, bad = list(CALL_F.encode()), list(BAD[0].encode())
    for good in ([258, *call, 259], [97, 258, 10, *call, 10, 259, 98], [258, *call, 259, *b"<tool_call>", *call, 259]):
        assert may_write(grammar, good)
    for wrong in ([258, *bad], [258, 259], [97, 259], [256]):
        assert not may_write(grammar, wrong)
    thinking = compiled(compiler, "json", thinks=True, special_ids={"<think>": 258, "</think>": 259})
    assert may_write(thinking, [258, *bad, 259, *call])
    assert not may_write(thinking, [258, 97, 259, *bad])
    assert not may_write(thinking, [258, 97, *b"</think>", *bad])
    assert may_write(thinking, call)
    assert may_write(thinking, [10, 258, *bad, 259, 10, *call])
    tagged = compiled(compiler, "llama3_json", special_ids={"<|python_tag|>": 258})
    for start in ([], [32], [258], [32, 258], [258, 10], list(b"<|python_tag|>")):
        assert may_write(tagged, [*start, *call])
        assert may_write(tagged, [*start, *b"Hello"])
        assert not may_write(tagged, [*start, *bad])


def read(parser: str, thinks: bool, opens: bool, text: str) -> tuple[AnswerReader, dict[str, Any]]:
    reader = TOOL_PARSERS[parser](["f", "g-1", "h"])
    reader = ThinkReader(reader, opens) if thinks else reader
    parts = reader.feed(text)
    return reader, joined(parts) if reader.has_open_call else joined([*parts, *reader.finish()])


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize("thinks", [False, True])
def test_whatever_a_model_writes_the_readers_find_no_other_calls(
    parser: str, thinks: bool, compiler: GrammarCompiler, bytes_tokenizer: Tokenizer
) -> None:
    draw = random.Random(f"{parser}{thinks}")
    pieces = [
        CALL_F,
        CALL_G,
        CALL_H,
        *BAD,
        marked(CALL_F),
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        " hi ",
        "[",
    ]
    found = 0
    for opens in (False, True) if thinks else (False,):
        for parallel in (True, False):
            grammar = compiled(compiler, parser, thinks=thinks, opens=opens, parallel=parallel)
            for _ in range(12):
                wish = list("".join(draw.choices(pieces, k=6)).encode())

                def choose(legal: list[int], position: int, wish: list[int] = wish) -> int:
                    """As it likes, but for a slip now and then."""
                    liked = wish[position] if position < len(wish) and draw.random() < 0.995 else draw.choice(legal)
                    return liked if liked in legal else draw.choice(legal)

                ids, _ = walk(grammar, choose, 120)
                text = b"".join(map(bytes_tokenizer.token_bytes, ids)).decode(errors="replace")
                reader, message = read(parser, thinks, opens, text)
                calls = message.get("tool_calls", [])
                assert parallel or len(calls) <= 1
                for index, call in enumerate(calls):
                    name, arguments = call["function"]["name"], call["function"]["arguments"]
                    assert name in ("f", "g-1", "h")
                    if index == len(calls) - 1 and reader.has_open_call:
                        continue
                    found += 1
                    value = json.loads(arguments)
                    assert isinstance(value, dict)
                    assert name != "f" or (set(value) == {"x"} and isinstance(value["x"], int))
                    assert name != "h" or not value
    assert found > 5


def test_schema_grammars_are_checked(compiler: GrammarCompiler) -> None:
    def refused(grammar: str, *schemas: Any) -> str:
        with pytest.raises(ParameterError) as raised:
            compiler.compile(StructuredOutputsParams(schema_grammar=SchemaGrammar(grammar=grammar, schemas=schemas)))
        assert raised.value.parameter == "structured_outputs.schema_grammar"
        return raised.value.reason

    wanted = StructuredOutputsParams(schema_grammar=SchemaGrammar(grammar='start: "a" schema_0', schemas=[SCHEMA]))
    assert writes(compiler.compile(wanted), 'a{"x": 3}')
    assert "foo" in refused("start: schema_0", {"foo": 1})
    assert "%json" in refused("start: %json {}")
    assert "schema_1" in refused("start: schema_1", {})
    with pytest.raises(ParameterError, match="must be a SchemaGrammar"):
        StructuredOutputsParams(schema_grammar="start: /a/")  # pyright: ignore[reportArgumentType]
