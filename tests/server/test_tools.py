"""Tools over HTTP: their fields, what reaches the prompt, forced calls, and whole answers against streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import tokenizers
from api_client import TOKENIZERS, Api
from fake_engine import FakeEngine

from jaxpage.errors import ParameterError
from jaxpage.params import SamplingParams
from jaxpage.server.tools.definitions import check_tools
from jaxpage.server.tools.parts import Content, Reasoning
from jaxpage.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
F = {"type": "function", "function": {"name": "f", "description": "Adds.", "parameters": SCHEMA}}
G = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
FORCED = '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }}:{{ t.function.parameters | tojson }};{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
)


@pytest.fixture
def engine(bytes_tokenizer) -> FakeEngine:
    return FakeEngine(bytes_tokenizer, max_model_len=4096)


@pytest.fixture
async def make_api(engine) -> AsyncIterator[Any]:
    """Makes an app with options."""
    made: list[Api] = []

    def make(**options: Any) -> Api:
        made.append(Api(engine, **options))
        return made[-1]

    yield make
    for api in made:
        await api.client.aclose()


def says(engine: FakeEngine, *texts: str) -> None:
    """Lets sample i say texts[i], byte by byte."""
    engine.script = lambda prompt, sample: list(texts[sample % len(texts)].encode())


def calls_of(choice: dict) -> list[tuple[str, str]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"].get("tool_calls", [])]


async def both(api: Api, **body: Any) -> list[dict[str, Any]]:
    """The choices of a whole answer, after a check that a stream's are the same."""
    answer = await api.chat(**body)
    chunks = await api.stream(PATH, **body)
    for choice in answer["choices"]:
        news = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert message_of([each["delta"] for each in news]) == without_ids(choice["message"])
        assert [each["finish_reason"] for each in news] == [None] * (len(news) - 1) + [choice["finish_reason"]]
        assert news[-1]["stop_reason"] == choice["stop_reason"]
    return answer["choices"]


def message_of(deltas: list[dict]) -> dict:
    """The message that a client adds up from deltas."""
    message: dict[str, Any] = {"role": deltas[0]["role"], "refusal": None, "content": ""}
    calls: list[dict] = []
    for delta in deltas:
        assert delta.get("content", "") is not None
        message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for piece in delta.get("tool_calls", []):
            if piece["index"] == len(calls):
                assert piece["id"].startswith("call_")
                calls.append({"type": piece["type"], "function": dict(piece["function"])})
            else:
                assert set(piece) == {"index", "function"}, "id, type and name come once"
                assert set(piece["function"]) == {"arguments"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    if not message["content"] and (calls or "reasoning_content" in message):
        message["content"] = None
    return message


def without_ids(message: dict) -> dict:
    calls = message.get("tool_calls")
    if calls is None:
        return message
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"].startswith("call_") and "index" not in call for call in calls)
    return message | {"tool_calls": [{key: call[key] for key in ("type", "function")} for call in calls]}


@pytest.mark.parametrize(
    ("choice", "text", "calls", "content", "reason"),
    [
        (NAMED, '{"x": 1}', [("f", '{"x": 1}')], None, "stop"),
        ("required", FORCED, [("f", '{"x": 1}'), ("g", "{}")], None, "tool_calls"),
        ("auto", "Well." + CALL_F, [("f", '{"x": 1}')], "Well.", "tool_calls"),
        (None, CALL_F, [("f", '{"x": 1}')], None, "tool_calls"),
        ("auto", "no need", [], "no need", "stop"),
        ("none", CALL_F, [], CALL_F, "stop"),
    ],
)
async def test_tool_1_forced_required_automatic_and_no_tool(make_api, engine, choice, text, calls, content, reason):
    says(engine, text)
    (answer,) = await both(make_api(), tools=[F, G], tool_choice=choice)
    assert calls_of(answer) == calls
    assert answer["message"]["content"] == content
    assert answer["finish_reason"] == reason
    assert ("tool_calls" in answer["message"]) == bool(calls)


BAD_TOOLS = [
    ([], None, "tools"),
    ("x", None, "tools"),
    ([5], None, "tools.0"),
    ([{}], None, "tools.0.function"),
    ([F, {"type": "function", "function": {}}], None, "tools.1.function.name"),
    ([F, F], None, "tools.1.function.name"),
    ([{"type": "function", "function": {"name": "a b"}}], None, "tools.0.function.name"),
    ([{"type": "function", "function": {"name": "a" * 65}}], None, "tools.0.function.name"),
    ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], None, "tools.0.function.parameters"),
    ([{"type": "function", "function": {"name": "f", "description": 5}}], None, "tools.0.function.description"),
    ([{"type": "function", "function": {"name": "f", "strict": 1}}], None, "tools.0.function.strict"),
    ([{"type": "magic", "function": {"name": "f"}}], None, "tools.0.type"),
    ([G], NAMED, "tool_choice.function.name"),
    ([F], {}, "tool_choice.type"),
    ([F], {"type": "function"}, "tool_choice.function"),
    ([F], {"type": "function", "function": {"name": 5}}, "tool_choice.function.name"),
    ([F], {"type": "allowed_tools"}, "tool_choice.type"),
    ([F], "maybe", "tool_choice"),
    ([F], 5, "tool_choice"),
    (None, "required", "tool_choice"),
    (None, "auto", "tool_choice"),
    (None, NAMED, "tool_choice"),
]


@pytest.mark.parametrize(("tools", "choice", "path"), BAD_TOOLS)
async def test_tool_1a_tool_lists_that_are_wrong(make_api, engine, tools, choice, path):
    api = make_api()
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": choice}
    for stream in (False, True):
        await api.refused(PATH, body | {"stream": stream}, path)
    await api.refused("/tokenize", body, path)
    assert not engine.seen


async def test_tool_1a_schemas_that_do_not_compile(make_api, engine, monkeypatch):
    def check(token_ids: Any, params: SamplingParams, priority: int = 0) -> None:
        """Stands for the grammar's compiler, which refuses the type "dict"."""
        if params.structured_outputs is not None and '"dict"' in json.dumps(params.structured_outputs.json):
            raise ParameterError("structured_outputs.json", "no such type")

    monkeypatch.setattr(engine, "check", check)
    api, bad = make_api(), {"type": "function", "function": {"name": "f", "parameters": {"type": "dict"}}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [G, bad]}
    for choice in (NAMED, "required"):
        message = await api.refused(PATH, body | {"tool_choice": choice}, "tools.1.function.parameters")
        assert "no such type" in message
    assert not engine.seen
    assert (await api.post(PATH, body)).status_code == 200, "schemas of tools that are not forced need not compile"


async def test_tool_1a_forced_calls_exclude_other_shapes(make_api, engine):
    api = make_api()
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [F]}
    for choice in (NAMED, "required"):
        await api.refused(PATH, body | {"tool_choice": choice, "use_beam_search": True}, "tool_choice")
        for name, value in [("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"})]:
            await api.refused(PATH, body | {"tool_choice": choice, name: value}, name)
    await api.refused(PATH, body | {"parallel_tool_calls": 1}, "parallel_tool_calls")
    await api.refused(PATH, body | {"functions": [{"name": "f"}]}, "functions")
    await api.refused(PATH, body | {"function_call": "auto"}, "function_call")
    assert not engine.seen


@pytest.mark.parametrize(
    ("text", "limit", "content", "calls", "reason"),
    [
        ("a <tool_ b", 100, "a <tool_ b", [], "stop"),
        (CALL_F, 11, "<tool_call>", [], "length"),
        (CALL_F, 45, None, [("f", '{"x": ')], "length"),
        ("x" + CALL_F + "y", 100, "xy", [("f", '{"x": 1}')], "tool_calls"),
    ],
)
async def test_tool_1b_text_that_looks_like_a_call(make_api, engine, text, limit, content, calls, reason):
    says(engine, text)
    (choice,) = await both(make_api(), tools=[F], max_tokens=limit)
    assert choice["message"]["content"] == content
    assert calls_of(choice) == calls
    assert choice["finish_reason"] == reason


async def test_tool_1b_a_call_cut_by_a_stop_string_is_no_call_that_ended(make_api, engine):
    says(engine, CALL_F)
    (choice,) = await both(make_api(), tools=[F], stop=["1}"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "1}")


@pytest.mark.parametrize(("choice", "text"), [("auto", CALL_F + "\n" + CALL_G), ("required", FORCED)])
async def test_tool_1c_multiple_calls(make_api, engine, choice, text):
    api = make_api()
    says(engine, text)
    (both_calls,) = await both(api, tools=[F, G], tool_choice=choice)
    assert calls_of(both_calls) == [("f", '{"x": 1}'), ("g", "{}")]
    (first,) = await both(api, tools=[F, G], tool_choice=choice, parallel_tool_calls=False)
    assert calls_of(first) == [("f", '{"x": 1}')]
    assert first["finish_reason"] == "tool_calls"


async def test_tool_1c_each_choice_has_its_own_list(make_api, engine):
    says(engine, CALL_F + CALL_G, CALL_G)
    choices = await both(make_api(), tools=[F, G], n=2)
    assert [calls_of(choice) for choice in choices] == [[("f", '{"x": 1}'), ("g", "{}")], [("g", "{}")]]


async def test_streams_keep_logprobs_and_token_ids(make_api, engine):
    says(engine, "ok" + CALL_F)
    body = {"tools": [F], "logprobs": True, "return_token_ids": True}
    api = make_api()
    whole = (await api.chat(**body))["choices"][0]
    news = [chunk["choices"][0] for chunk in await api.stream(PATH, **body)]
    assert [token for each in news[1:] for token in each["token_ids"]] == whole["token_ids"]
    content = [entry for each in news if each["logprobs"] for entry in each["logprobs"]["content"]]
    assert content == whole["logprobs"]["content"]
    assert len(content) == len("ok" + CALL_F) + 1


async def constraint(api: Api, engine: FakeEngine, **body: Any) -> Any:
    """The schema that the engine was given."""
    says(engine, "{}")
    await api.chat(**body)
    params = engine.seen[-1][1]
    assert isinstance(params, SamplingParams)
    return params.structured_outputs and params.structured_outputs.json


async def test_tool_1_forced_calls_are_a_grammar(make_api, engine):
    api = make_api()
    assert await constraint(api, engine, tools=[F], tool_choice="auto") is None
    assert await constraint(api, engine, tools=[F, G], tool_choice=NAMED) == SCHEMA
    schema = await constraint(api, engine, tools=[F, G], tool_choice="required")
    accepts = jsonschema.Draft202012Validator(schema).is_valid
    f, g = {"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}
    assert accepts([f])
    assert accepts([f, g, f])
    for bad in ([], f, [{"name": "f", "arguments": {}}], [{"name": "g", "arguments": {"x": 1}}], [{"name": "h"}], [5]):
        assert not accepts(bad)
    schema = await constraint(api, engine, tools=[F, G], tool_choice="required", parallel_tool_calls=False)
    accepts = jsonschema.Draft202012Validator(schema).is_valid
    assert accepts(f)
    assert accepts(g)
    assert not accepts([f])


async def test_references_inside_a_tools_schema_keep_their_meaning(make_api, engine):
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/$ref"}, "$ref": {"const": {"$ref": "#/x"}}}}
    tree = {
        "$defs": {"$ref": node},
        "type": "object",
        "properties": {"root": {"$ref": "#"}, "n": {"$ref": "#/$defs/$ref"}},
    }
    tool = {"type": "function", "function": {"name": "t", "parameters": tree}}
    schema = await constraint(make_api(), engine, tools=[F, tool], tool_choice="required")
    accepts = jsonschema.Draft202012Validator(schema).is_valid
    for arguments, fine in [
        ({"root": {"n": {"next": {"next": {}}}}}, True),
        ({"root": {"n": {"next": {"next": 5}}}}, False),
        ({"n": {"$ref": {"$ref": "#/x"}}}, True),
        ({"n": {"$ref": {"$ref": "#/$defs/1/x"}}}, False),
    ]:
        assert accepts([{"name": "t", "arguments": arguments}]) == fine


async def prompt(api: Api, engine: FakeEngine, **body: Any) -> str:
    await api.chat(**body)
    return engine.tokenizer.decode(engine.seen[-1][0])


async def test_tools_reach_templates_that_know_them(make_api, engine, bytes_tokenizer, monkeypatch):
    monkeypatch.setattr(bytes_tokenizer, "chat_template", WITH_TOOLS)
    api = make_api()
    history = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 7}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": '{"a": 1}'},
    ]
    text = await prompt(api, engine, messages=history, tools=[F])
    assert text == f'f:{json.dumps(SCHEMA)};[user]u[assistant]<tool_call>7[tool]{{"a": 1}}'
    assert (await prompt(api, engine, messages=history, tools=[F], tool_choice="none")).startswith("[user]")
    tokens = (await api.post("/tokenize", {"messages": history, "tools": [F]})).json()["tokens"]
    assert engine.tokenizer.decode(tokens) == text


async def test_tools_are_explained_where_the_template_does_not(make_api, engine):
    api = make_api()
    user = {"role": "user", "content": "u"}
    text = await prompt(api, engine, messages=[user], tools=[F])
    explanation = text.removeprefix("[system]").removesuffix("<|end|>[user]u<|end|>[assistant]")
    assert json.dumps(F["function"]) in explanation.splitlines()
    assert "<tool_call>\n" in explanation
    calls = [{"id": str(i), "function": {"name": "f", "arguments": f'{{"x": {i}}}'}} for i in range(2)]
    history = [
        {"role": "system", "content": "s"},
        user,
        {"role": "assistant", "content": "ok", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "zero"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
    ]
    assert await prompt(api, engine, messages=history, tools=[F]) == (
        f"[system]s\n\n{explanation}<|end|>[user]u<|end|>[assistant]ok\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": 0}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|end|>'
        "[user]<tool_response>\nzero\n</tool_response>\n<tool_response>\none\n</tool_response><|end|>"
        '[assistant]<tool_call>\n{"name": "f", "arguments": {"x": 0}}\n</tool_call><|end|>[assistant]'
    )
    parts = [{"role": "developer", "content": [{"type": "text", "text": "d"}]}, user]
    assert (await prompt(api, engine, messages=parts, tools=[F])).startswith(f"[developer]d\n{explanation}")
    plain = make_api(tool_prompt="template")
    assert await prompt(plain, engine, messages=[user], tools=[F]) == "[user]u<|end|>[assistant]"


@pytest.mark.parametrize(
    ("template", "text", "parser"),
    [
        ("{{ messages[0].content }}", CALL_F, "auto"),
        ("{{ tools }}<tool_call>", CALL_F, "auto"),
        ('{{ tools }}ipython {"name": , "parameters": }', '{"name": "f", "parameters": {"x": 1}}; ', "auto"),
        ("{{ tools }}", '[{"name": "f", "arguments": {"x": 1}}]', "auto"),
        ("{{ tools }}", CALL_F, "hermes"),
        ("{{ tools }}<tool_call>", '{"name": "f", "arguments": {"x": 1}}', "json"),
        ("{{ tools }}", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "llama3_json"),
    ],
)
async def test_the_format_of_calls(make_api, engine, bytes_tokenizer, monkeypatch, template, text, parser):
    monkeypatch.setattr(bytes_tokenizer, "chat_template", template)
    says(engine, text)
    (choice,) = await both(make_api(tool_call_parser=parser), tools=[F])
    assert calls_of(choice) == [("f", '{"x": 1}')]


async def test_markers_that_are_special_tokens_are_not_skipped(bytes_tokenizer):
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZERS / "bytes_tokenizer" / "tokenizer.json"))
    backend.add_special_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer = Tokenizer(backend, special_tokens={}, chat_template=bytes_tokenizer.chat_template)
    engine = FakeEngine(tokenizer, max_model_len=4096)
    engine.vocab_size = tokenizer.vocab_size
    engine.script = lambda prompt, sample: tokenizer.encode("<think>hm</think>" + CALL_F)
    (choice,) = await both(Api(engine, reasoning_parser="think"), tools=[F])
    assert choice["message"]["reasoning_content"] == "hm"
    assert calls_of(choice) == [("f", '{"x": 1}')]
    (choice,) = await both(Api(engine), tools=[F])
    assert choice["message"]["content"] == "<think>hm</think>"
    (choice,) = await both(Api(engine))
    assert choice["message"]["content"] == 'hm\n{"name": "f", "arguments": {"x": 1}}\n', "as the client asked"


async def test_automatic_choice_can_be_switched_off(make_api, engine):
    api = make_api(enable_auto_tool_choice=False)
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [F]}
    await api.refused(PATH, body, "tool_choice")
    assert not engine.seen
    says(engine, '{"x": 1}')
    (choice,) = await both(api, tools=[F], tool_choice=NAMED)
    assert calls_of(choice) == [("f", '{"x": 1}')]


async def test_a_constrained_answer_is_content(make_api):
    setup = make_api(reasoning_parser="think").app.state.server.chat
    tools = check_tools({"tools": [F], "tool_choice": "auto"})
    text = "<think>x</think>" + CALL_F
    assert setup.reader(tools, is_constrained=True, opens_thoughts=True).feed(text) == [Content(text)]
    assert setup.reader(tools, is_constrained=False, opens_thoughts=False).feed(text)[0] == Reasoning("x")
