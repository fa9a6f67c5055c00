"""POST /v1/chat/completions: messages, templates, the shape of answers and chunks."""

from __future__ import annotations

import pytest
from api_client import Api, joined
from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('system role is not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}[{{ m['role'] }}]{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}<{{ p['type'] }}>{{ p['text'] }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def template(bytes_tokenizer, monkeypatch):
    """Sets the model's template for one test."""
    return lambda source: monkeypatch.setattr(bytes_tokenizer, "chat_template", source)


def user(content) -> dict:
    return {"role": "user", "content": content}


async def prompt_text(api: Api, engine: FakeEngine, messages: list, **body) -> str:
    """The prompt that the engine got for ``messages``."""
    answer = await api.chat(messages=messages, return_token_ids=True, **body)
    assert answer["prompt_token_ids"] == engine.seen[-1][0]
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    return engine.tokenizer.decode(engine.seen[-1][0])


async def test_whole_answer(api):
    answer = await api.chat(return_token_ids=True)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [268, 269, 274, 257],
        }
    ]


async def test_str_1_chunks_of_each_choice_in_order(api, engine):
    lengths = (9, 2, 5)
    engine.script = lambda prompt, sample: [97] * lengths[sample]
    for n in (1, 3):
        chunks = await api.stream(PATH, n=n, return_token_ids=True, stream_options={"include_usage": True})
        assert chunks.pop()["usage"]["completion_tokens"] == sum(lengths[:n]) + n
        for index in range(n):
            choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert choices[0]["finish_reason"] is None
            assert all("role" not in c["delta"] and c["delta"].get("content", "") is not None for c in choices[1:])
            assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
            assert choices[-1]["delta"] == {}
            assert joined(chunks, index) == "a" * lengths[index]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[0]["prompt_token_ids"] == engine.seen[-1][0]
    answer = await api.chat(n=3)
    assert [c["message"]["content"] for c in answer["choices"]] == ["a" * length for length in lengths]


async def test_use_1_one_token_makes_one_content_chunk(api):
    chunks = await api.stream(PATH, max_tokens=1)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_log_2_alternatives_that_are_parts_of_characters(api, engine):
    engine.script = lambda prompt, sample: [261, 131, 98]
    engine.alternatives = {1: {240: -1.0, 128: -2.0, 274: -3.0}}
    answer = await api.chat(logprobs=True, top_logprobs=4, max_tokens=3)
    content = answer["choices"][0]["logprobs"]["content"]
    chosen = [entry["bytes"] for entry in content]
    assert chosen == [[32, 226, 152], [131], [98]]
    assert (
        bytes(byte for token in chosen for byte in token).decode()
        == answer["choices"][0]["message"]["content"]
        == " ☃b"
    )
    top = content[1]["top_logprobs"]
    assert [entry["bytes"] for entry in top] == [[131], [240], [128], [32, 119, 111, 114, 108, 100]]
    assert top[3]["token"] == " world"
    assert len(top) == 4


async def test_log_3_streams_carry_logprobs(api, engine):
    engine.script = lambda prompt, sample: [97, 264, 78, 265, 98]
    body = {"logprobs": True, "top_logprobs": 3, "stop": ["KLMNOPQ"]}
    whole = (await api.chat(**body))["choices"][0]["logprobs"]["content"]
    chunks = await api.stream(PATH, **body)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == whole
    assert len(whole) == 6
    assert {len(entry["top_logprobs"]) for entry in whole} == {3}


async def test_chosen_token_outside_the_alternatives(api, engine):
    engine.alternatives = {0: {1: -0.1, 2: -0.2}}
    entry = (await api.chat(logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == "Hel"
    assert [alternative["bytes"] for alternative in entry["top_logprobs"]] == [[1], [2]]
    names = (await api.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
    assert names["content"][0]["token"] == "token_id:268"
    assert names["content"][0]["top_logprobs"][0]["token"] == "token_id:1"


async def test_tpl_1_refusals_are_client_errors(api, template):
    template(STRICT)
    for messages, parameter, words in [
        ([{"role": "system", "content": "s"}, user("u")], "messages", "system role is not supported"),
        ([user("a"), user("b")], "messages", "roles must alternate user/assistant"),
        ([{"role": "assistant", "content": "a"}, user("b")], "messages", "roles must alternate user/assistant"),
        ([{"role": "developer", "content": "a"}], "messages", "roles must alternate user/assistant"),
        ([{"role": 5, "content": "a"}], "messages.0.role", "5"),
        ([{"content": "a"}], "messages.0.role", "None"),
        ([{"role": "user"}], "messages.0.content", "user"),
    ]:
        for stream in (False, True):
            message = await api.refused(PATH, {"messages": messages, "stream": stream}, parameter)
            assert words in message
    await api.chat(messages=[user("a")])


async def test_no_template_and_broken_templates(api, template):
    for source in (None, "{% for %}", "{{ undefined_function() }}", "{{ ''.__class__.__mro__ }}"):
        template(source)
        await api.refused(PATH, {"messages": [user("a")]}, "messages")


async def test_tpl_1c_user_text_is_not_template_code(api, engine):
    text = "{{ 7*7 }} {% raw %} {# x #} ${x}"
    assert await prompt_text(api, engine, [user(text)]) == f"[user]{text}<|end|>[assistant]"


async def test_tpl_2_content_as_parts(api, engine, template):
    parts = [{"text": "first", "type": "text"}, {"text": "second", "type": "text"}]
    assert await prompt_text(api, engine, [user(parts)]) == "[user]first\nsecond<|end|>[assistant]"
    assert await prompt_text(api, engine, [user(parts[:1])]) == "[user]first<|end|>[assistant]"
    template(PARTS)
    assert "<text>first<text>second" in await prompt_text(api, engine, [user(parts)])
    for bad, path in [
        ([], ""),
        ([{"text": "x"}], ".0.type"),
        ([parts[0], {"type": "image_url", "image_url": {}}], ".1.type"),
        ([{"type": "text"}], ".0.text"),
        ([{"type": "text", "text": 5}], ".0.text"),
        (["x"], ".0"),
    ]:
        await api.refused(PATH, {"messages": [user(bad)]}, "messages.0.content" + path)


async def test_tpl_2a_content_null_missing_empty(api, engine):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for message in (user(None), {"role": "user"}, {"role": "assistant"}, {"role": "tool", "content": None}):
        await api.refused(PATH, {"messages": [message]}, "messages.0.content")
    for content in (5, True, {"a": 1}):
        await api.refused(PATH, {"messages": [user(content)]}, "messages.0.content")
    assert await prompt_text(api, engine, [user("")]) == "[user]<|end|>[assistant]"
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert await prompt_text(api, engine, [calling]) == "[assistant]<|end|>[assistant]"


async def test_earlier_tool_calls_are_checked(api, engine, template):
    template(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": '{"a": "seen"}'}
    message = {"role": "assistant", "tool_calls": [{"function": function}]}
    assert await prompt_text(api, engine, [message]) == "seen"
    path = "messages.0.tool_calls"
    for calls, parameter in [
        (5, path),
        ([5], path + ".0"),
        ([{"function": {}}], path + ".0"),
        ([{"function": {"name": "f", "arguments": {}}}], path + ".0.function.arguments"),
        ([{"function": {"name": "f", "arguments": "{"}}], path + ".0.function.arguments"),
    ]:
        await api.refused(PATH, {"messages": [message | {"tool_calls": calls}]}, parameter)


async def test_tpl_2b_extra_keys_and_odd_roles(api, engine):
    message = user("a") | {"name": "n", "weight": 1, "annotations": [], "refusal": None}
    assert await prompt_text(api, engine, [message]) == "[user]a<|end|>[assistant]"
    assert await prompt_text(api, engine, [{"role": "critic", "content": "a"}]) == "[critic]a<|end|>[assistant]"
    await api.refused(PATH, {"messages": [user("a")] * 1000}, "messages")
    await api.refused(PATH, {"messages": "a"}, "messages")
    await api.refused(PATH, {"messages": ["a"]}, "messages.0")
    await api.refused(PATH, {"messages": [message | {"name": 5}]}, "messages.0.name")


async def test_bos_1b_open_ended_final_message(api, engine):
    messages = [user("Hi"), {"role": "assistant", "content": "Sure, "}]
    text = await prompt_text(api, engine, messages, continue_final_message=True, add_generation_prompt=False)
    assert text == "[user]Hi<|end|>[assistant]Sure, "
    assert await prompt_text(api, engine, messages, continue_final_message=True) == text
    assert await prompt_text(api, engine, messages, add_generation_prompt=False) == text + "<|end|>"
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    await api.refused(PATH, both, "continue_final_message")
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    assert (await api.chat(**body))["choices"][0]["message"]["content"] == "Sure, Hello world"
    assert joined(await api.stream(PATH, **body)) == "Sure, Hello world"
    assert (await api.chat(messages=messages, echo=True))["choices"][0]["message"]["content"] == "Hello world"


async def test_bos_1_the_template_alone_decides_on_bos(wordmark_tokenizer, monkeypatch):
    engine = FakeEngine(wordmark_tokenizer, [271])
    api = Api(engine)
    for source, special, count in [
        ("{{ bos_token }}{{ messages[0]['content'] }}", False, 1),
        ("{{ bos_token }}{{ messages[0]['content'] }}", True, 1),
        ("{{ messages[0]['content'] }}", False, 0),
        ("{{ messages[0]['content'] }}", True, 1),
    ]:
        monkeypatch.setattr(wordmark_tokenizer, "chat_template", source)
        answer = await api.chat(messages=[user("It")], add_special_tokens=special, return_token_ids=True, max_tokens=1)
        assert answer["prompt_token_ids"].count(1) == count


async def test_chat_template_kwargs_reach_the_template(api, engine, template):
    template("{{ 'yes' if enable_thinking else 'no' }}")
    assert await prompt_text(api, engine, [user("a")], chat_template_kwargs={"enable_thinking": True}) == "yes"
    assert await prompt_text(api, engine, [user("a")]) == "no"


async def test_prompt_logprobs_stand_beside_the_choices(api):
    answer = await api.chat(prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert list(answer["prompt_logprobs"][1]) == [str(ord("u"))]
