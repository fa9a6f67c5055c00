"""The flags that say how the model chats."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpage import serve
from jaxpage.server import chat_cli, chat_setup
from jaxpage.server.options import ServerOptions


def options(*flags: str) -> ServerOptions:
    return ServerOptions.from_cli_args(serve.build_parser().parse_args(flags))


def test_defaults_are_those_of_the_options():
    given, defaults = options(), ServerOptions()
    for name in ("chat_template", "chat_template_content_format", "trust_request_chat_template", "tool_prompt"):
        assert getattr(given, name) == getattr(defaults, name)
    for name in ("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"):
        assert getattr(given, name) == getattr(defaults, name)


def test_flags_reach_the_options(tmp_path: Path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ 'ü' }}", encoding="utf-8")
    given = options(
        *("--chat-template", str(file), "--chat-template-content-format", "openai", "--trust-request-chat-template"),
        *("--no-enable-auto-tool-choice", "--tool-call-parser", "hermes", "--tool-prompt", "template"),
        *("--reasoning-parser", "think"),
    )
    assert (given.chat_template, given.chat_template_content_format) == ("{{ 'ü' }}", "openai")
    assert given.trust_request_chat_template
    assert not given.enable_auto_tool_choice
    assert (given.tool_call_parser, given.tool_prompt, given.reasoning_parser) == ("hermes", "template", "think")
    assert options("--chat-template", "{{ messages }}").chat_template == "{{ messages }}"


@pytest.mark.parametrize("value", ["no/such/file.jinja", "."])
def test_a_template_that_cannot_be_read(value: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        options("--chat-template", value)
    assert "--chat-template: cannot read" in capsys.readouterr().err


def test_choices_are_what_the_server_has():
    assert set(chat_cli.TOOL_CALL_PARSERS) == {"auto", *chat_setup.TOOL_PARSERS}
    assert set(chat_cli.CONTENT_FORMATS) == set(chat_setup.CONTENT_FORMATS)
