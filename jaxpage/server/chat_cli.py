"""Owns the flags that say how the served model chats: its template, its calls of tools and its thoughts.

It must not know what the flags lead to. Names and meaning are vLLM's where it has the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxpage.server.options import ServerOptions

DEFAULTS = ServerOptions()
CONTENT_FORMATS = ("auto", "string", "openai")
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "json")
TOOL_PROMPTS = ("auto", "template")
REASONING_PARSERS = ("none", "think")


def add_chat_args(group: Any) -> None:
    """Adds the flags to an argument group."""
    group.add_argument(
        "--chat-template", type=_template, metavar="FILE", help="Jinja template instead of the model's own"
    )
    group.add_argument(
        "--chat-template-content-format",
        choices=CONTENT_FORMATS,
        default=DEFAULTS.chat_template_content_format,
        help="whether the template takes content as text or as a list of parts (default: as it shows)",
    )
    group.add_argument(
        "--trust-request-chat-template", action="store_true", help="let calls bring a chat_template of their own"
    )
    group.add_argument(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.enable_auto_tool_choice,
        help="let the model choose whether it calls a tool (default: on)",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        default=DEFAULTS.tool_call_parser,
        help="the format of the model's calls (default: the one its template shows)",
    )
    group.add_argument(
        "--tool-prompt",
        choices=TOOL_PROMPTS,
        default=DEFAULTS.tool_prompt,
        help="auto explains tools in a system message if the template does not; template leaves them out then",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default=DEFAULTS.reasoning_parser,
        help="think moves what stands in <think> to reasoning_content (default: none)",
    )


def _template(value: str) -> str:
    """The template in the file ``value``, or ``value`` itself if it is one."""
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" in value:
            return value
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise argparse.ArgumentTypeError(f"cannot read {value[:200]!r}: {reason}") from None
