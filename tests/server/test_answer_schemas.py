"""Every answer and every chunk against OpenAI's own description of them, and whole answers against ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_client import Api, events
from jsonschema import Draft202012Validator

from jaxpage.server.openapi.answers import answer_schemas

pytestmark = pytest.mark.anyio
OPENAI = json.loads((Path(__file__).parents[1] / "data" / "openai_openapi" / "response_schemas.json").read_text())
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def openai(name: str, body: Any) -> None:
    """Fails unless ``body`` is what OpenAI calls ``name``."""
    Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": OPENAI["$defs"]}).validate(body)


def ours(name: str, body: Any) -> None:
    """Fails unless ``body`` is what /openapi.json calls ``name``."""
    schemas = {"components": {"schemas": answer_schemas()}}
    Draft202012Validator({"$ref": f"#/components/schemas/{name}"} | schemas).validate(body)


COMPLETION_BODIES = [
    {},
    {"prompt": ["a", "b"], "n": 2},
    {"logprobs": 2},
    {"logprobs": 0, "echo": True},
    {"echo": True, "max_tokens": 0},
    {"max_tokens": 1},
    {"stop": "wor"},
    {"stop_token_ids": [269]},
    {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1},
    {"prompt_logprobs": 1},
    {"use_beam_search": True, "n": 2, "logprobs": 1},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
CHAT_BODIES = [
    {},
    {"n": 3},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2},
    {"max_tokens": 1},
    {"stop": "wor"},
    {"return_token_ids": True},
    {"prompt_logprobs": 1},
    {"use_beam_search": True, "n": 2},
    {"tools": [TOOL], "tool_choice": "none"},
    {"messages": [*USER, {"role": "assistant", "content": "We"}], "continue_final_message": True, "echo": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


def whole(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "stream_options"}


@pytest.mark.parametrize("body", COMPLETION_BODIES, ids=str)
async def test_completions(api, body):
    answer = await api.complete(**{"prompt": "Hi"} | whole(body))
    openai("CreateCompletionResponse", answer)
    ours("Completion", answer)
    if not {"prompt_logprobs", "use_beam_search"} & body.keys():
        for chunk in await api.stream(COMPLETIONS, **{"prompt": "Hi"} | body):
            openai("CreateCompletionStreamChunk", chunk)


@pytest.mark.parametrize("body", CHAT_BODIES, ids=str)
async def test_chats(api, body):
    answer = await api.chat(**whole(body))
    openai("CreateChatCompletionResponse", answer)
    ours("ChatCompletion", answer)
    if not {"prompt_logprobs", "use_beam_search"} & body.keys():
        for chunk in await api.stream(CHAT, **body):
            openai("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "json"])
async def test_chats_that_call_tools(engine, parser):
    call = '{"name": "f", "arguments": {"a": 1}}'
    text = {"hermes": f"<tool_call>\n{call}\n</tool_call>"}.get(parser, call.replace("arguments", "parameters"))
    engine.script = lambda prompt, sample: engine.tokenizer.encode(text)
    engine.max_model_len = 600
    api = Api(engine, tool_call_parser=parser)
    answer = await api.chat(tools=[TOOL])
    openai("CreateChatCompletionResponse", answer)
    ours("ChatCompletion", answer)
    if parser != "json":
        assert answer["choices"][0]["message"]["tool_calls"], answer
    for chunk in await api.stream(CHAT, tools=[TOOL]):
        openai("CreateChatCompletionStreamResponse", chunk)


async def test_models_and_small_endpoints(api):
    async def get(path: str) -> Any:
        return (await api.client.get(path)).json()

    openai("ListModelsResponse", await get("/v1/models"))
    openai("Model", await get("/v1/models/fake"))
    for name, path in (
        ("Models", "/v1/models"),
        ("Model", "/v1/models/fake"),
        ("TokenizerInfo", "/tokenizer_info"),
        ("Version", "/version"),
        ("Load", "/load"),
    ):
        ours(name, await get(path))
    for name, path, body in (
        ("Tokens", "/tokenize", {"prompt": "Hi", "return_token_strs": True}),
        ("Tokens", "/tokenize", {"messages": USER}),
        ("Text", "/detokenize", {"tokens": [97]}),
        ("Embeddings", "/v1/embeddings", {"input": "Hi"}),
        ("Embeddings", "/v1/embeddings", {"input": ["Hi", "You"], "encoding_format": "base64"}),
    ):
        ours(name, (await api.post(path, body)).json())


@pytest.mark.parametrize(
    "body", [{"prompt": 5}, {"prompt": "Hi", "model": "x"}, b"{", {"prompt": "Hi", "n": 0}], ids=str
)
async def test_refusals(api, body):
    for path in (COMPLETIONS, CHAT, "/nowhere"):
        error = (await api.post(path, body)).json()
        openai("ErrorBody", error)
        ours("Error", error)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_faults_in_mid_stream(api, engine, path):
    engine.fail_after = 1
    body = {"prompt": "Hi", "messages": USER, "stream": True}
    *chunks, last = events((await api.post(path, body)).text)
    assert chunks
    openai("ErrorBody", last)
    ours("Error", last)
