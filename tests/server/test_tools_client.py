"""The official openai client against a real socket: tools and thoughts, whole, streamed and parsed into classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import openai
import pydantic
import pytest
from api_client import serving
from fake_engine import FakeEngine

from jaxpage.server.app import create_app
from jaxpage.server.options import ServerOptions

MESSAGES = [{"role": "user", "content": "Weather in Paris and Rome?"}]
CALLS = "".join(
    f'\n<tool_call>\n{{"name": "Weather", "arguments": {{"city": "{city}", "days": {days}}}}}\n</tool_call>'
    for city, days in [("Paris", 1), ("Rome", 2)]
)


class Weather(pydantic.BaseModel):
    """The forecast for a city."""

    city: str
    days: int


TOOL = openai.pydantic_function_tool(Weather)


@pytest.fixture(scope="module")
def engine(bytes_tokenizer) -> FakeEngine:
    return FakeEngine(bytes_tokenizer, max_model_len=4096)


@pytest.fixture(scope="module")
def client(engine) -> Iterator[openai.OpenAI]:
    app = create_app(engine, ServerOptions(reasoning_parser="think"))
    with (
        serving(app) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield client


@pytest.fixture
def says(engine) -> Callable[[str], None]:
    def say(text: str) -> None:
        engine.script = lambda prompt, sample: list(text.encode())

    return say


def test_tool_1_whole_answer(client, says):
    says("<think>Two calls.</think>Let me see." + CALLS)
    choice = client.chat.completions.create(model="fake", messages=MESSAGES, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "Two calls."
    first, second = choice.message.tool_calls
    assert json.loads(first.function.arguments) == {"city": "Paris", "days": 1}
    assert second.function.name == "Weather"
    assert first.id != second.id
    history = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": first.id, "content": "sunny"}]
    says("Sunny.")
    choice = client.chat.completions.create(model="fake", messages=history, tools=[TOOL]).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "Sunny.", None)


def test_tool_1b_streamed_answer(client, says):
    says("Let me see." + CALLS)
    arguments: dict[int, str] = {}
    names = []
    chunks = list(client.chat.completions.create(model="fake", messages=MESSAGES, tools=[TOOL], stream=True))
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
            if call.function.name:
                names.append((call.index, call.function.name))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert names == [(0, "Weather"), (1, "Weather")]
    assert [json.loads(arguments[index]) for index in (0, 1)] == [
        {"city": "Paris", "days": 1},
        {"city": "Rome", "days": 2},
    ]


def test_tool_1_stream_helper(client, says):
    says("Let me see." + CALLS)
    with client.chat.completions.stream(model="fake", messages=MESSAGES, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Let me see."
    assert [call.function.parsed_arguments for call in final.message.tool_calls] == [
        Weather(city="Paris", days=1),
        Weather(city="Rome", days=2),
    ]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments.city for event in done] == ["Paris", "Rome"]
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 10, "piece by piece"


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("auto", CALLS),
        ("required", '[{"name": "Weather", "arguments": {"city": "Paris", "days": 1}}]'),
        ({"type": "function", "function": {"name": "Weather"}}, '{"city": "Paris", "days": 1}'),
    ],
)
def test_tool_1_parse(client, says, choice, text):
    says(text)
    answer = client.chat.completions.parse(model="fake", messages=MESSAGES, tools=[TOOL], tool_choice=choice)
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Paris", days=1)
    assert answer.choices[0].finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls")


def test_thoughts_in_a_stream(client, says):
    says("<think>Hm.</think>Yes.")
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


def test_tool_1a_errors_name_the_field(client):
    tool = {"type": "function", "function": {"name": "a b"}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="fake", messages=MESSAGES, tools=[tool])
    assert refused.value.param == "tools.0.function.name"
