"""Owns telling a model about tools when its chat template does not: in a system message, with calls in Hermes' format.

It must not know templates or how calls are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxpage.server.tools import hermes

_EXPLANATION = """You can call functions when they help with the request. Each line here describes one of them:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between these tags, once for each call:
{open}
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
{close}
What a function returns comes back between <tool_response> and </tool_response>."""


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` as a template takes them that knows neither tools nor calls; they are not changed.

    The tools are explained at the end of the leading system message. Earlier calls become text of the assistant, and
    their results text of the user.
    """
    told: list[dict[str, Any]] = [{"role": "system", "content": ""}]
    if messages and messages[0]["role"] in ("system", "developer"):
        told, messages = [dict(messages[0])], messages[1:]
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    explanation = _EXPLANATION.format(tools=lines, open=hermes.OPEN, close=hermes.CLOSE)
    told[0]["content"] = _with_text(told[0]["content"], explanation, "\n\n")
    in_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if not is_result:
            told.append(_with_written_calls(message))
        elif in_results:
            told[-1]["content"] += "\n" + _result(message)
        else:
            told.append({"role": "user", "content": _result(message)})
        in_results = is_result
    return told


def _with_written_calls(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    texts = []
    for call in message["tool_calls"]:
        name, arguments = json.dumps(call["function"]["name"]), call["function"]["arguments"] or "{}"
        texts.append(f'{hermes.OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{hermes.CLOSE}')
    written = {key: value for key, value in message.items() if key != "tool_calls"}
    return written | {"content": _with_text(message["content"], "\n".join(texts), "\n")}


def _result(message: dict[str, Any]) -> str:
    content = message["content"]
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    return f"<tool_response>\n{text}\n</tool_response>"


def _with_text(content: str | list[dict[str, str]], text: str, separator: str) -> str | list[dict[str, str]]:
    """``content`` with ``text`` at its end."""
    if isinstance(content, str):
        return f"{content}{separator}{text}" if content else text
    return [*content, {"type": "text", "text": text}]
