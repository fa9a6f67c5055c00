"""Thoughts over HTTP: told from the answer, whole and in streams, with the prompt's share of the markers."""

from __future__ import annotations

import pytest
from api_client import Api
from fake_engine import FakeEngine
from test_tools import CALL_F, F, both, calls_of, says

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
OPENING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)


@pytest.fixture
def engine(bytes_tokenizer) -> FakeEngine:
    return FakeEngine(bytes_tokenizer, max_model_len=4096)


@pytest.fixture
def api(engine) -> Api:
    return Api(engine, reasoning_parser="think")


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("<think>\nhm <b>\n</think>\n\nyes", "hm <b>\n", "yes"),
        ("yes", None, "yes"),
        ("<think></think>yes", None, "yes"),
        ("<think>hm</think>", "hm", None),
        ("2 < 3 <think>", None, "2 < 3 <think>"),
    ],
)
async def test_thoughts_are_told_from_the_answer(api, engine, text, thoughts, content):
    says(engine, text)
    (choice,) = await both(api)
    assert choice["message"].get("reasoning_content") == thoughts
    assert choice["message"]["content"] == content
    assert choice["finish_reason"] == "stop"


async def test_without_the_option_thoughts_are_content(engine):
    says(engine, "<think>hm</think>yes")
    (choice,) = await both(Api(engine))
    assert choice["message"] == {"role": "assistant", "content": "<think>hm</think>yes", "refusal": None}


async def test_thoughts_cut_by_the_length(api, engine):
    says(engine, "<think>hm</think>yes")
    (choice,) = await both(api, max_tokens=12)
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm</t"[:5],
    }
    assert choice["finish_reason"] == "length"


async def test_streams_never_show_half_a_marker(api, engine):
    says(engine, "<think>a</b></think>c")
    deltas = [chunk["choices"][0]["delta"] for chunk in await api.stream(PATH)]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["a", "</b", ">"]
    assert [delta["content"] for delta in deltas if delta.get("content")] == ["c"]


async def test_each_choice_thinks_for_itself(api, engine):
    says(engine, "<think>a</think>b", "c")
    choices = await both(api, n=2)
    assert [choice["message"].get("reasoning_content") for choice in choices] == ["a", None]


async def test_include_reasoning_false_leaves_thoughts_out(api, engine):
    says(engine, "<think>a</think>b")
    (choice,) = await both(api, include_reasoning=False)
    assert choice["message"] == {"role": "assistant", "content": "b", "refusal": None}
    await api.refused(
        PATH, {"messages": [{"role": "user", "content": "u"}], "include_reasoning": 1}, "include_reasoning"
    )


async def test_templates_that_open_the_thoughts(engine):
    api = Api(engine, reasoning_parser="think", chat_template=OPENING)
    says(engine, "a</think>b")
    (choice,) = await both(api)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("a", "b")
    asked = [{"role": "user", "content": "what is <think>?"}]
    says(engine, "b")
    (choice,) = await both(api, messages=asked, add_generation_prompt=False)
    assert choice["message"]["content"] == "b", "what the user writes opens nothing"


async def test_thoughts_of_a_continued_message(engine):
    api = Api(engine, reasoning_parser="think", chat_template=OPENING)
    says(engine, "b</think>c")
    for start, thoughts, content in [("<think>a", "b", "c"), ("<think>a</think>", None, "b</think>c")]:
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": start}]
        (choice,) = await both(api, messages=messages, continue_final_message=True)
        assert choice["message"].get("reasoning_content") == thoughts
        assert choice["message"]["content"] == content
    messages[-1]["content"] = "<think>a"
    (choice,) = await both(api, messages=messages, continue_final_message=True, echo=True)
    assert choice["message"]["reasoning_content"] == "ab"


async def test_thoughts_before_a_call(api, engine):
    says(engine, "<think>\nI need f: <tool_call></think>\n" + CALL_F)
    (choice,) = await both(api, tools=[F])
    assert choice["message"]["reasoning_content"] == "I need f: <tool_call>"
    assert choice["message"]["content"] is None
    assert calls_of(choice) == [("f", '{"x": 1}')]
    assert choice["finish_reason"] == "tool_calls"


async def test_forced_calls_hold_no_thoughts(api, engine):
    says(engine, '{"x": "<think>"}')
    (choice,) = await both(api, tools=[F], tool_choice={"type": "function", "function": {"name": "f"}})
    assert calls_of(choice) == [("f", '{"x": "<think>"}')]


async def test_reasoning_effort_needs_a_template_that_uses_it(api, engine):
    body = {"messages": [{"role": "user", "content": "u"}], "reasoning_effort": "low"}
    for path in (PATH, "/tokenize"):
        await api.refused(path, body, "reasoning_effort")
        await api.refused(path, body | {"reasoning_effort": "huge"}, "reasoning_effort")
    using = Api(engine, chat_template="effort: {{ reasoning_effort }}")
    await using.chat(**body)
    assert engine.tokenizer.decode(engine.seen[-1][0]) == "effort: low"
    await using.chat(**body, chat_template_kwargs={"reasoning_effort": "max"})
    assert engine.tokenizer.decode(engine.seen[-1][0]) == "effort: max"
