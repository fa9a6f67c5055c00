"""Chat templates over HTTP: the outside render matrix, templates of requests and of the start, one count of tokens."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from api_client import TOKENIZERS, Api
from fake_engine import FakeEngine

from jaxpage.tokenizer import Tokenizer, sandbox

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
MATRIX = json.loads((TEMPLATES / "render_matrix.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "u"}]


@pytest.fixture
def engine(bytes_tokenizer) -> FakeEngine:
    return FakeEngine(bytes_tokenizer, [97], max_model_len=4096)


@pytest.fixture(scope="module")
def matrix_tokenizer() -> Tokenizer:
    """BYTES with the special tokens that the matrix was rendered with."""
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZERS / "bytes_tokenizer" / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def over_http(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments of calls are objects in the matrix and JSON text on the wire."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize("name", sorted(MATRIX["expected"]))
async def test_tpl_1a_render_matrix(matrix_tokenizer, monkeypatch, name):
    monkeypatch.setitem(sandbox._environment().globals, "strftime_now", lambda _: "01 Jan 2025")
    engine = FakeEngine(matrix_tokenizer, max_model_len=4096)
    engine.vocab_size = matrix_tokenizer.vocab_size
    source = (TEMPLATES / name).read_text(encoding="utf-8")
    # The matrix knows templates only: tools that a template does not take are not in its prompts.
    api = Api(engine, chat_template=source, tool_prompt="template")
    for column, expected in MATRIX["expected"][name].items():
        messages = MATRIX["message_lists"][column.removesuffix("/no_generation_prompt").removesuffix("+tools")]
        body: dict[str, Any] = {"messages": over_http(messages)}
        body["add_generation_prompt"] = not column.endswith("/no_generation_prompt")
        if column.endswith("+tools"):
            body["tools"] = MATRIX["tools"]
        if expected.get("text") == "":
            assert "empty" in await api.refused(PATH, body, "messages"), column
        elif "NoneType" in expected.get("message", ""):
            # The template fails on content null. Here that is an empty text (TPL-2a), on which these do not.
            answer = await api.post(PATH, body)
            assert answer.status_code == 200 or "must alternate" in answer.text, column
        elif expected["outcome"] == "text":
            answer = await api.chat(**body, return_token_ids=True, max_tokens=1)
            assert matrix_tokenizer.decode(answer["prompt_token_ids"]) == expected["text"], column
        else:
            assert expected["message"] in await api.refused(PATH, body, "messages"), column


ATTACKS = [
    "{{ ''.__class__.__mro__ }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ undefined_function() }}",
    "{% include 'other.txt' %}",
    "{{ 'x' * 10**9 }}",
    "{% for %}",
    "{{ raise_exception('no') }}",
]


@pytest.mark.parametrize("source", ATTACKS)
async def test_tpl_1b_templates_are_sandboxed(engine, source):
    trusting = Api(engine, trust_request_chat_template=True)
    at_start = Api(engine, chat_template=source)
    for path in (PATH, "/tokenize"):
        for api, body in [(trusting, {"messages": USER, "chat_template": source}), (at_start, {"messages": USER})]:
            start = time.monotonic()
            await api.refused(path, body, "messages")
            assert time.monotonic() - start < 2
    assert not engine.seen
    assert (await trusting.complete(prompt="Hi"))["choices"]


async def test_tpl_1b_templates_of_requests_need_the_servers_trust(engine):
    for path in (PATH, "/tokenize"):
        await Api(engine).refused(path, {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template")
        api = Api(engine, trust_request_chat_template=True)
        for bad in (5, "", "x" * 70_000):
            await api.refused(path, {"messages": USER, "chat_template": bad}, "chat_template")
    await api.chat(chat_template="{{ messages[0].content }}!", messages=USER)
    assert engine.tokenizer.decode(engine.seen[-1][0]) == "u!"


async def test_a_template_from_the_start_replaces_the_models_own(engine):
    api = Api(engine, chat_template="{{ messages[0].content }}?")
    await api.chat(messages=USER)
    assert engine.tokenizer.decode(engine.seen[-1][0]) == "u?"
    info = (await api.client.get("/tokenizer_info")).json()
    assert info["chat_template"] == "{{ messages[0].content }}?"


async def test_tpl_2_content_format_can_be_given(engine):
    source = "{% set c = messages[0].content %}{{ 'text' if c is string else c[0].text ~ '+' ~ c[1].text }}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content_format, text in [("auto", "text"), ("string", "text"), ("openai", "a+b")]:
        api = Api(engine, chat_template=source, chat_template_content_format=content_format)
        await api.chat(messages=[{"role": "user", "content": parts}])
        assert engine.tokenizer.decode(engine.seen[-1][0]) == text
    walking = "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}"
    await Api(engine, chat_template=walking, chat_template_content_format="openai").chat(messages=USER)
    assert engine.tokenizer.decode(engine.seen[-1][0]) == "<u>"


async def test_tpl_1c_text_that_looks_like_template_code(engine):
    text = "{{ 7*7 }} {% raw %} {# x #} ${x} <|im_end|>"
    answer = await Api(engine).chat(messages=[{"role": "user", "content": text}])
    rendered = engine.tokenizer.decode(engine.seen[-1][0])
    assert rendered == f"[user]{text}<|end|>[assistant]"
    tokens = (await Api(engine).post("/tokenize", {"prompt": rendered, "add_special_tokens": False})).json()
    assert answer["usage"]["prompt_tokens"] == tokens["count"]


CHATS = [
    USER,
    [{"role": "system", "content": "s"}, *USER],
    [*USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "ü 漢"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}],
    [{"role": "user", "content": ""}],
]


@pytest.mark.parametrize("messages", CHATS)
async def test_bos_1a_counts_agree_everywhere(engine, messages):
    api = Api(engine)
    answer = await api.chat(messages=messages, return_token_ids=True, prompt_logprobs=0)
    tokenized = (await api.post("/tokenize", {"messages": messages})).json()
    assert tokenized["tokens"] == answer["prompt_token_ids"] == engine.seen[-1][0]
    assert tokenized["count"] == answer["usage"]["prompt_tokens"] == len(answer["prompt_logprobs"])


async def test_bos_1c_a_tokenizer_that_adds_an_end_token():
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZERS / "wordmark_tokenizer" / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(backend, special_tokens=special, chat_template="{{ bos_token }}{{ messages[0].content }}")
    engine = FakeEngine(tokenizer, [271])
    api = Api(engine)
    await api.complete(prompt="It", max_tokens=1)
    for add_special_tokens in (False, True):
        body = {"messages": [{"role": "user", "content": "It"}], "add_special_tokens": add_special_tokens}
        await api.chat(**body, max_tokens=1)
    assert [(ids.count(1), ids.count(2)) for ids, _, _ in engine.seen] == [(1, 0)] * 3


async def test_documents_need_a_template_that_uses_them(engine):
    body = {"messages": USER, "documents": [{"title": "t", "text": "x"}]}
    await Api(engine).refused(PATH, body, "documents")
    api = Api(engine, chat_template="{% for d in documents %}{{ d.title }}{% endfor %}")
    await api.refused(PATH, body | {"documents": 5}, "documents")
    await api.chat(**body)
    assert engine.tokenizer.decode(engine.seen[-1][0]) == "t"


@pytest.mark.parametrize(
    ("field", "bad", "fine"),
    [
        ("store", [True, 1], [False, None]),
        ("service_tier", ["flex", 5], ["auto", "default", None]),
        ("verbosity", ["low", 5], ["medium", None]),
        ("modalities", [["audio"], "text"], [["text"], None]),
        ("functions", [[{"name": "f"}]], [None]),
        ("function_call", ["auto"], [None]),
        ("metadata", [], [{"a": "b"}]),
        ("prompt_cache_key", [], ["a"]),
        ("safety_identifier", [], ["a"]),
    ],
)
async def test_fields_of_openai_that_ask_for_more_than_text(engine, field, bad, fine):
    api = Api(engine)
    for value in bad:
        await api.refused(PATH, {"messages": USER, field: value}, field)
    assert not engine.seen
    for value in fine:
        await api.chat(messages=USER, **{field: value})
