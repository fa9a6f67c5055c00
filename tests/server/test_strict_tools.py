"""``strict`` tools where the model chooses: what reaches the engine, and what is refused under which name."""

from __future__ import annotations

from typing import Any

import pytest
from api_client import TOKENIZERS, Api
from compiling_engine import CompilingEngine
from fake_engine import FakeEngine

from jaxpage.params import SamplingParams, SchemaGrammar
from jaxpage.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "Hi"}]


def tool(name: str, strict: bool | None = True, schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


def body(*tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "tools": list(tools), **fields}


@pytest.fixture(scope="module")
def compiling_engine() -> CompilingEngine:
    tokenizer = Tokenizer.from_directory(TOKENIZERS / "bytes_tokenizer")
    tokenizer.chat_template = "{{ messages[-1].content }}"
    return CompilingEngine(tokenizer)


async def grammar_of(api: Api, engine: FakeEngine, wanted: dict[str, Any]) -> SchemaGrammar | None:
    """What the engine was given for it, in whole answers and streams."""
    seen = []
    for stream in (False, True):
        response = await api.post(PATH, wanted | {"stream": stream})
        assert response.status_code == 200, response.text
        params = engine.seen[-1][1]
        assert isinstance(params, SamplingParams)
        outputs = params.structured_outputs
        assert outputs is None or outputs.schema_grammar is not None or wanted.get("response_format")
        seen.append(None if outputs is None else outputs.schema_grammar)
    assert seen[0] == seen[1]
    return seen[0]


async def test_tool_1_strict_tools_make_a_grammar(compiling_engine: CompilingEngine) -> None:
    api, engine = Api(compiling_engine), compiling_engine
    f, g = tool("f"), tool("g", None, {"type": "dict"})
    for free in (body(g), body(f, tool_choice="none"), body(tool("g", False))):
        assert await grammar_of(api, engine, free) is None
    grammar = await grammar_of(api, engine, body(f, g))
    assert grammar is not None
    assert grammar.schemas == [SCHEMA, {"type": "object"}], "a schema that is not strict need not compile"
    assert "<tool_call>" in grammar.grammar
    assert "TAIL: " in grammar.grammar
    once = await grammar_of(api, engine, body(f, g, parallel_tool_calls=False))
    assert once is not None and once.grammar != grammar.grammar
    assert await grammar_of(api, engine, body(f, response_format={"type": "json_object"})) is None
    bare = await grammar_of(Api(engine, tool_call_parser="json"), engine, body(f))
    assert bare is not None and "<tool_call>" not in bare.grammar


async def test_thoughts_have_their_place(compiling_engine: CompilingEngine) -> None:
    api, engine = Api(compiling_engine, reasoning_parser="think"), compiling_engine
    closed = await grammar_of(api, engine, body(tool("f")))
    opened = await grammar_of(api, engine, body(tool("f"), messages=[{"role": "user", "content": "<think>"}]))
    assert closed is not None and "start: first | opening thoughts" in closed.grammar
    assert opened is not None and "start: thoughts" in opened.grammar


async def test_tool_1a_what_strict_tools_exclude(compiling_engine: CompilingEngine) -> None:
    api = Api(compiling_engine)
    num_seen = len(compiling_engine.seen)
    bad = tool("g", True, {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=b)"}}})
    message = await api.refused(PATH, body(tool("f"), bad), "tools.1.function.parameters")
    assert "$.properties.a: pattern" in message
    refused = await api.refused(
        PATH, body(tool("e", False), tool("f"), use_beam_search=True), "tools.1.function.strict"
    )
    assert "use_beam_search" in refused
    for name, value in [("ignore_eos", True), ("min_tokens", 2), ("bad_words", ["x"]), ("allowed_token_ids", [1])]:
        message = await api.refused(PATH, body(tool("f"), **{name: value}), name)
        assert message.startswith(f"{name}: cannot be combined with tools that are strict, got ")
        message = await api.refused(PATH, body(tool("f"), tool_choice="required", **{name: value}), name)
        assert "cannot be combined with tool_choice required, got " in message
        constrained = {"messages": MESSAGES, "response_format": {"type": "json_object"}, name: value}
        assert "cannot be combined with response_format, got " in await api.refused(PATH, constrained, name)
    assert len(compiling_engine.seen) == num_seen
