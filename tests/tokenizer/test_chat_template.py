"""Chat templates: an outside render matrix, content forms, refusals and the sandbox (behaviour cases TPL-*, BOS-1b)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpage.errors import ParameterError
from jaxpage.tokenizer import ChatTemplateError, Tokenizer, chat_template

TEMPLATES = Path(__file__).parent.parent / "data" / "chat_templates"
MATRIX = json.loads((TEMPLATES / "render_matrix.json").read_text(encoding="utf-8"))
CELLS = [(name, column) for name, columns in MATRIX["expected"].items() for column in columns]
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(("name", "column"), CELLS)
def test_tpl_1a_render_matrix(name: str, column: str) -> None:
    expected = MATRIX["expected"][name][column]
    messages = column.removesuffix("/no_generation_prompt").removesuffix("+tools")

    def render() -> str:
        return chat_template.render(
            (TEMPLATES / name).read_text(encoding="utf-8"),
            MATRIX["message_lists"][messages],
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
            tools=MATRIX["tools"] if column.endswith("+tools") else None,
            add_generation_prompt=not column.endswith("/no_generation_prompt"),
            variables={"strftime_now": lambda _: "01 Jan 2025"},
        )

    if expected["outcome"] == "text":
        assert render() == expected["text"]
    else:
        with pytest.raises(ChatTemplateError) as caught:
            render()
        assert str(caught.value) == expected["message"]


def test_matrix_is_complete() -> None:
    assert len(CELLS) == 20 * 12


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["system", "user"], "system role is not supported"),
        (["user", "user"], "roles must alternate user/assistant"),
        (["assistant", "user"], "roles must alternate user/assistant"),
        (["developer"], "roles must alternate user/assistant"),
    ],
)
def test_tpl_1_refusals(bytes_tokenizer: Tokenizer, fixtures: dict[str, Any], roles: list[str], message: str) -> None:
    strict = fixtures["templates"]["strict"]
    with pytest.raises(ChatTemplateError, match=message):
        bytes_tokenizer.render_chat([{"role": role, "content": "x"} for role in roles], chat_template=strict)
    assert bytes_tokenizer.render_chat(HI, chat_template=strict) == "[user]Hi<|end|>[assistant]"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ undefined_function() }}",
        "{% include 'other.txt' %}",
        "{{ 'x' * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10 ** 100000000 }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ 'a'|indent(10**9, true) }}",
        "{{ {}|tojson(indent=10**9) }}",
        "{{ 'x'|center(10**9) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{% for",
    ],
)
def test_tpl_1b_sandbox(bytes_tokenizer: Tokenizer, source: str) -> None:
    begin = time.process_time()
    with pytest.raises(ChatTemplateError):
        bytes_tokenizer.render_chat(HI, chat_template=source)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}", "12"),
        ("{{ {'a': 'é<', 'b': none}|tojson }}", '{"a": "é<", "b": null}'),
        ("{{ 'a' ~ none ~ 1 }}|{{ none }}|{{ missing }}|{{ none|trim }}", "a1|||"),
        ("{{ '**{}** {{}}'.format('a') }}{{ '%s %d' % ('b', 2) }}{{ 2 * 'ab' }}{{ 7 % 4 }}", "**a** {}b 2abab3"),
        ("{{ ['a', 'b']|join(', ') }}{{ 'x\ny'|indent(2) }}{{ 'ab'|replace('a', 'c') }}", "a, bx\n  ycb"),
        ("{{ messages|map(attribute='role')|join('-') }}{{ 'a,b'.split(',')|join('+') }}", "usera+b"),
        ("{{ strftime_now('%%') }}{{ bos_token }}{{ unk_token }}", "%<|bos|>"),
    ],
)
def test_dialect(bytes_tokenizer: Tokenizer, source: str, text: str) -> None:
    assert bytes_tokenizer.render_chat(HI, chat_template=source) == text


def test_tpl_1c_user_text_is_data(bytes_tokenizer: Tokenizer) -> None:
    content = "{{ 7*7 }} {% raw %} {# x #} ${x} <|im_end|>"
    messages = [{"role": "user", "content": content}]
    text = bytes_tokenizer.render_chat(messages)
    assert text == f"[user]{content}<|end|>[assistant]"
    assert bytes_tokenizer.encode_chat(messages) == bytes_tokenizer.encode(text)


def test_tpl_2_content_parts(bytes_tokenizer: Tokenizer, fixtures: dict[str, Any]) -> None:
    templates = fixtures["templates"]
    messages = [{"role": "user", "content": [{"text": t, "type": "text"} for t in ("first", "second")]}]
    plain = bytes_tokenizer.render_chat(messages, chat_template=templates["plain"])
    assert plain == "[user]first\nsecond<|end|>[assistant]"
    parts = bytes_tokenizer.render_chat(messages, chat_template=templates["parts"])
    assert parts == "[user]<text>first<text>second<|end|>[assistant]"
    assert bytes_tokenizer.render_chat(HI, chat_template=templates["parts"]) == "[user]Hi<|end|>[assistant]"


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ([], "messages[0].content"),
        ([{"text": "x"}], "messages[0].content[0].type"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[0].content[0].type"),
        ([{"type": "text", "text": "x"}, {"type": "text"}], "messages[0].content[1].text"),
        ([{"type": "text", "text": 5}], "messages[0].content[0].text"),
        (["x"], "messages[0].content[0]"),
        (5, "messages[0].content"),
        (True, "messages[0].content"),
        ({"a": 1}, "messages[0].content"),
    ],
)
@pytest.mark.parametrize("name", ["plain", "parts"])
def test_tpl_2_bad_content(
    bytes_tokenizer: Tokenizer, fixtures: dict[str, Any], name: str, content: object, path: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        bytes_tokenizer.render_chat([{"role": "user", "content": content}], chat_template=fixtures["templates"][name])
    assert caught.value.parameter == path


def test_tpl_2a_none_is_never_written(bytes_tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert bytes_tokenizer.render_chat(messages) == "[user]Hi<|end|>[assistant]<|end|>[assistant]"


def test_tool_call_arguments_become_objects(bytes_tokenizer: Tokenizer) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments.x }}"
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert bytes_tokenizer.render_chat(messages, chat_template=source) == "1"
    assert call["function"]["arguments"] == '{"x": 1}'
    call["function"]["arguments"] = "{"
    with pytest.raises(ParameterError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments: not JSON"):
        bytes_tokenizer.render_chat(messages, chat_template=source)


def test_tpl_2b_extra_keys_and_many_messages(bytes_tokenizer: Tokenizer) -> None:
    message = {"role": "critic", "content": "x", "name": "n", "weight": 1, "refusal": None}
    assert bytes_tokenizer.render_chat([message] * 1000).count("[critic]x") == 1000
    with pytest.raises(ParameterError, match=r"messages\[1\]: expected an object, got 'x'"):
        bytes_tokenizer.render_chat([message, "x"])  # pyright: ignore[reportArgumentType]


def test_bos_1b_continue_final_message(bytes_tokenizer: Tokenizer, fixtures: dict[str, Any]) -> None:
    messages = [*HI, {"role": "assistant", "content": "Sure, "}]

    def render(**flags: bool) -> str:
        return bytes_tokenizer.render_chat(messages, **flags)  # pyright: ignore[reportArgumentType]

    assert render(continue_final_message=True, add_generation_prompt=False).endswith("[assistant]Sure, ")
    assert render(add_generation_prompt=False).endswith("[assistant]Sure, <|end|>")
    with pytest.raises(ParameterError, match="continue_final_message: cannot be combined"):
        render(continue_final_message=True, add_generation_prompt=True)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    text = bytes_tokenizer.render_chat(
        parts,
        continue_final_message=True,
        add_generation_prompt=False,
        chat_template=fixtures["templates"]["parts"],
    )
    assert text == "[user]<text>a<text>b"
    with pytest.raises(ChatTemplateError, match="does not write the final message"):
        bytes_tokenizer.render_chat(
            HI, continue_final_message=True, add_generation_prompt=False, chat_template="{{ messages[0].role }}"
        )
    for empty in ([], [{"role": "assistant", "content": None}]):
        with pytest.raises(ParameterError, match="needs a final message"):
            bytes_tokenizer.render_chat(empty, continue_final_message=True, add_generation_prompt=False)


def test_bos_1b_real_template(gguf_tokenizer: Callable[[str], Tokenizer]) -> None:
    messages = [*HI, {"role": "assistant", "content": "Sure, "}]
    smol = gguf_tokenizer("smollm2-135m-instruct")
    text = smol.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure, ")


def test_template_variables(bytes_tokenizer: Tokenizer) -> None:
    source = "{{ enable_thinking }}{{ bos_token }}"
    kwargs = {"enable_thinking": False, "bos_token": "B"}
    assert bytes_tokenizer.render_chat(HI, chat_template=source, chat_template_kwargs=kwargs) == "FalseB"
    with pytest.raises(ParameterError, match="chat_template_kwargs: may not set messages"):
        bytes_tokenizer.render_chat(HI, chat_template_kwargs={"messages": []})


def test_no_template(tmp_path: Path) -> None:
    source = Path(__file__).parent.parent / "data" / "tokenizers" / "bytes_tokenizer" / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        Tokenizer.from_directory(tmp_path).render_chat(HI)


def test_template_sources(tmp_path: Path) -> None:
    source = Path(__file__).parent.parent / "data" / "tokenizers" / "bytes_tokenizer" / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    named = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.render_chat(HI), tokenizer.render_chat(HI, tools=MATRIX["tools"])) == ("config", "tools")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}), encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).render_chat(HI) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja", encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).chat_template == "jinja"
