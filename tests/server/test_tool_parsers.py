"""The readers of calls and thoughts: what they find, and that it does not depend on how the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.server.reasoning import ThinkReader
from jaxpage.server.tools.forced import NamedCallReader
from jaxpage.server.tools.hermes import HermesReader
from jaxpage.server.tools.json_default import JsonReader
from jaxpage.server.tools.json_scanner import JsonScanner, NotJsonError, State
from jaxpage.server.tools.llama3_json import Llama3JsonReader
from jaxpage.server.tools.parts import AnswerReader, ContentReader, joined

NAMES = ["f", "g"]
READERS: dict[str, Callable[[], AnswerReader]] = {
    "content": ContentReader,
    "hermes": HermesReader,
    "json": lambda: JsonReader(NAMES),
    "llama3_json": lambda: Llama3JsonReader(NAMES),
    "named": lambda: NamedCallReader("f"),
    "think": lambda: ThinkReader(HermesReader(), False),
    "thinking": lambda: ThinkReader(HermesReader(), True),
}


def read(reader: AnswerReader, pieces: list[str]) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """Content, calls and reasoning of a text."""
    parts = [part for piece in pieces for part in reader.feed(piece)]
    fields = joined([*parts, *reader.finish()])
    calls = fields.get("tool_calls", [])
    assert [call["index"] for call in calls] == list(range(len(calls)))
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return fields.get("content"), functions, fields.get("reasoning_content")


HERMES_TEXTS = [
    ("a <tool_ b", "a <tool_ b", []),
    ("a <tool_", "a <tool_", []),
    ("<tool_call>", "<tool_call>", []),
    ("<tool_call>\n", "<tool_call>\n", []),
    ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ('x<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>y', "xy", [("f", '{"x": 1}')]),
    ('\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n', None, [("f", '{"x": 1}')]),
    ('<tool_call>{"arguments": {"x": [1, {}]}, "name": "f"}</tool_call>', None, [("f", '{"x": [1, {}]}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', None, [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "arguments": "Paris"}</tool_call>', None, [("f", '"Paris"')]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": 1.5}</tool_call>', None, [("f", "1.5")]),
    ('<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
    ('<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [1]}</tool_call>', None, [("f", "{}")]),
    ('<tool_call>{"name": "other", "parameters": {}}</tool_call>', None, [("other", "{}")]),
    ('<tool_call>{"name": "\\u0066", "arguments": {"a": "</tool_call>"}}', None, [("f", '{"a": "</tool_call>"}')]),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_c', None, [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}} and', "and", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1', None, [("f", '{"x": 1')]),
    ('<tool_call>{"name": "f", "arguments": {x: 1}}</tool_call>y', "y", [("f", "{x: 1}}")]),
    ("<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
    ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ('<tool_call>{"name": "\\ud83d"}</tool_call>', '<tool_call>{"name": "\\ud83d"}</tool_call>', []),
    ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        None,
        [("f", "{}"), ("g", "{}")],
    ),
    ('<tool_call>?<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>?", [("f", "{}")]),
    ('a \n<tool_call>{"name": "f"}</tool_call>\n\nb ', "a \nb ", [("f", "{}")]),
    ('a \n<tool_call>{"name": "f"}</tool_call>\n', "a", [("f", "{}")]),
    ("  \n", "  \n", []),
]

JSON_TEXTS = [
    ('{"name": "f", "arguments": {"x": 1}}', None, [("f", '{"x": 1}')]),
    (
        ' [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "parameters": {}}]\n',
        None,
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    ('{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}', None, [("f", "{}"), ("g", "{}")]),
    ('{"city": "Paris"}', '{"city": "Paris"}', []),
    ('{"name": "Paris", "arguments": {}}', '{"name": "Paris", "arguments": {}}', []),
    ('[{"name": "f"', '[{"name": "f"', []),
    ("[1, 2]", "[1, 2]", []),
    ("[", "[", []),
    ("Hello", "Hello", []),
    ('{"name": "f", "arguments": {}} done', " done", [("f", "{}")]),
    ('[{"name": "f", "arguments": {}}, 5]', ", 5]", [("f", "{}")]),
    ('{"name": "f", "arguments": {oops', None, [("f", "{oops")]),
    ('{"type": "function", "name": "f"}', None, [("f", "{}")]),
]

LLAMA_TEXTS = [
    ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', None, [("f", '{"x": 1}')]),
    ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', None, [("f", "{}"), ("g", "{}")]),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("<|python", "<|python", []),
]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [("hermes", *row) for row in HERMES_TEXTS]
    + [("json", *row) for row in JSON_TEXTS]
    + [("llama3_json", *row) for row in JSON_TEXTS + LLAMA_TEXTS]
    + [("named", '{"x": 1}', None, [("f", '{"x": 1}')]), ("named", "", None, [("f", "")])],
)
def test_tool_1b_calls_and_content(name: str, text: str, content: str | None, calls: list) -> None:
    assert read(READERS[name](), [text]) == (content, calls, None)
    assert read(READERS[name](), list(text)) == (content, calls, None)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("think", "<think>\nhm</think>\n\nyes", ("yes", [], "hm")),
        ("think", " \n<think></think>yes", ("yes", [], None)),
        ("think", "yes <think>no</think>", ("yes <think>no</think>", [], None)),
        ("think", "<thin", ("<thin", [], None)),
        ("think", "<think>a</thi", (None, [], "a</thi")),
        ("think", "<think>a</think>\n", (None, [], "a")),
        ("think", "a</think>b", ("a</think>b", [], None)),
        ("thinking", "\na </think>b", ("b", [], "a ")),
        ("thinking", "a", (None, [], "a")),
        ("thinking", '<tool_call></think><tool_call>{"name": "f"}', (None, [("f", "{}")], "<tool_call>")),
    ],
)
def test_thoughts(name: str, text: str, expected: tuple) -> None:
    assert read(READERS[name](), [text]) == expected
    assert read(READERS[name](), list(text)) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_", "<|python_tag|>", "{", "}", "[", "]", ",", ";", " ",
    "\n", '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "parameters": {"y": "\\n}"}}', '"name"', ":", '"f"',
    "1", "x", '"arguments"', '{"name": "f", "arguments": {', '"\\u0041"', "null", "-1.5e3",
]  # fmt: skip


@given(st.sampled_from(sorted(READERS)), st.lists(st.sampled_from(FRAGMENTS), max_size=8), st.data())
def test_tool_1_stream_and_whole_agree(name: str, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(READERS[name](), pieces) == read(READERS[name](), [text])


@given(st.sampled_from(["hermes", "json", "llama3_json"]), st.text(max_size=30))
def test_tool_1b_text_without_calls_stays_as_it_is(name: str, text: str) -> None:
    assert read(READERS[name](), list(text)) == (text or None, [], None)


def test_tool_1b_only_what_may_be_a_marker_is_held_back() -> None:
    reader = HermesReader()
    assert joined(reader.feed("a<b <tool")) == {"content": "a<b"}
    assert joined(reader.feed("s>")) == {"content": " <tools>"}
    bare = JsonReader(NAMES)
    assert joined(bare.feed(' {"city')) == {}
    assert joined(bare.feed('":')) == {"content": ' {"city":'}


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = HermesReader()
    reader.feed('<tool_call>{"name": "f", "arguments": ')
    assert not reader.has_open_call
    (start,) = joined(reader.feed('{"x"'))["tool_calls"]
    assert (start["function"]["name"], start["function"]["arguments"]) == ("f", '{"x"')
    assert reader.has_open_call
    assert joined(reader.feed(": 1"))["tool_calls"] == [{"index": 0, "function": {"arguments": ": 1"}}]
    assert joined(reader.feed("}}</tool"))["tool_calls"] == [{"index": 0, "function": {"arguments": "}"}}]
    assert not reader.has_open_call
    assert reader.feed("_call>") == reader.finish() == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(json_values, st.booleans(), st.sampled_from([None, 2]))
def test_scanner_follows_json(value: object, ascii_only: bool, indent: int | None) -> None:
    scanner = JsonScanner()
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    for number, char in enumerate(text):
        scanner.push(char)
        assert (scanner.state is State.DONE) == (number == len(text) - 1 and text[0] in '{["')
    scanner.push(" ")
    assert scanner.state is State.DONE


@given(st.text(alphabet='{}[]",:1-.e\\u tfnalsrue', max_size=12))
def test_scanner_refuses_exactly_what_is_not_json(text: str) -> None:
    scanner = JsonScanner()
    try:
        for char in text + " ":
            scanner.push(char)
        accepted = scanner.state is State.DONE
    except NotJsonError:
        accepted = False
    try:
        json.loads(text)
    except ValueError:
        assert not accepted
    else:
        assert accepted
