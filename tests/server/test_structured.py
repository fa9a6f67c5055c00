"""The fields of structured output over HTTP: what is handed to the engine, and what is refused under which name."""

from __future__ import annotations

from typing import Any

import pytest
from api_client import Api
from compiling_engine import CompilingEngine

from jaxpage.params import SamplingParams, StructuredOutputsParams
from jaxpage.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
SCHEMA = "response_format.json_schema.schema"


@pytest.fixture(scope="module")
def shared_engine() -> CompilingEngine:
    from api_client import TOKENIZERS

    return CompilingEngine(Tokenizer.from_directory(TOKENIZERS / "bytes_tokenizer"))


@pytest.fixture
def compiling(shared_engine: CompilingEngine) -> Api:
    shared_engine.seen.clear()
    return Api(shared_engine)


def body(path: str, **fields: Any) -> dict[str, Any]:
    start = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    return start | fields


def with_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@both
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, {"json_object": True}),
        (with_schema({"type": "null"}), {"json": {"type": "null"}}),
        ({"structured_outputs": {"json": {"type": "null"}, "regex": None}}, {"json": {"type": "null"}}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json": '{"type": "null"}'}),
        ({"structured_outputs": {"regex": "a+", "json_object": False}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"guided_json": {"type": "null"}}, {"json": {"type": "null"}}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)
async def test_what_reaches_the_engine(
    path: str, fields: Any, expected: Any, compiling: Api, shared_engine: CompilingEngine
) -> None:
    response = await compiling.post(path, body(path, **fields))
    assert response.status_code == 200, response.text
    params = shared_engine.seen[-1][1]
    assert isinstance(params, SamplingParams)
    assert params.structured_outputs == (None if expected is None else StructuredOutputsParams(**expected))


@both
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"foo": 1}}, "guided_json"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
async def test_so_1a_wrong_forms(path: str, fields: Any, name: str, compiling: Api) -> None:
    await compiling.refused(path, body(path, **fields), name)
    await compiling.refused(path, body(path, **fields, stream=True), name)


@both
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"name": "text"}}, {"type": "strange"}, {"enum": []}, {"enum": "a"},
        {"type": "string", "pattern": "[a"}, {"$ref": "#/$defs/missing"}, {"type": "integer", "minimum": "low"},
        {"required": "a"}, {"foo": 1}, {"$ref": "http://127.0.0.1:9/x.json"}, {"not": {}}, "", 5, [],
    ],
)  # fmt: skip
async def test_so_1_and_so_1b_schemas_that_do_not_compile(
    path: str, schema: Any, compiling: Api, shared_engine: CompilingEngine
) -> None:
    await compiling.refused(path, body(path, **with_schema(schema)), SCHEMA)
    await compiling.refused(path, body(path, structured_outputs={"json": schema}), "structured_outputs.json")
    assert not shared_engine.seen
    assert (await compiling.post(path, body(path))).status_code == 200


@both
async def test_so_1_parts_of_json_schema(path: str, compiling: Api) -> None:
    where = "response_format.json_schema"
    for changes, name in [
        ({"schema": None}, f"{where}.schema"),
        ({"name": None}, f"{where}.name"),
        ({"name": ""}, f"{where}.name"),
        ({"name": 5}, f"{where}.name"),
        ({"strict": "yes"}, f"{where}.strict"),
        ({"description": 5}, f"{where}.description"),
    ]:
        wanted = {"name": "a", "schema": {"type": "null"}, "strict": True, "description": "b"} | changes
        wanted = {key: value for key, value in wanted.items() if value is not None}
        await compiling.refused(path, body(path, response_format={"type": "json_schema", "json_schema": wanted}), name)


@both
async def test_stop_3b_empty_collections_of_structured_output(path: str, compiling: Api) -> None:
    for kind, value in [("choice", []), ("regex", ""), ("json", ""), ("grammar", ""), ("choice", [""])]:
        await compiling.refused(path, body(path, structured_outputs={kind: value}), f"structured_outputs.{kind}")
    await compiling.refused(path, body(path, bad_words=[""]), "bad_words")
    assert (await compiling.post(path, body(path, bad_words=[]))).status_code == 200


@both
async def test_what_contradicts_a_grammar(path: str, compiling: Api) -> None:
    for fields, name in [
        ({"use_beam_search": True}, "structured_outputs"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"allowed_token_ids": [65]}, "allowed_token_ids"),
    ]:
        await compiling.refused(path, body(path, structured_outputs={"regex": "a"}, **fields), name)
    wanted = {"response_format": {"type": "json_object"}, "use_beam_search": True}
    await compiling.refused(path, body(path, **wanted), "response_format")
    await compiling.refused(path, body(path, bad_words=["x"], use_beam_search=True), "bad_words")


@both
async def test_bad_words_reach_the_engine(path: str, compiling: Api, shared_engine: CompilingEngine) -> None:
    assert (await compiling.post(path, body(path, bad_words=["x", " y"]))).status_code == 200
    params = shared_engine.seen[-1][1]
    assert isinstance(params, SamplingParams)
    assert params.bad_words == ["x", " y"]
