"""Owns the shape of chat messages: roles, content as text or parts, earlier tool calls.

It must not know templates; what a role means is for them to say.
"""

from __future__ import annotations

import json
from typing import Any

from jaxpage.errors import ParameterError, shown

MAX_MESSAGES = 10_000


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates take them: content a string or a list of text parts, never None.

    Raises:
        ParameterError: with the dotted path of what is wrong, such as ``messages.0.content.1.text``.
    """
    if not isinstance(messages, list):
        raise ParameterError("messages", f"must be a list of messages, got {shown(messages)}")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise ParameterError("messages", f"must hold 1 to {MAX_MESSAGES} messages, got {len(messages)}")
    return [_check_message(f"messages.{index}", message) for index, message in enumerate(messages)]


def texts(message: dict[str, Any]) -> list[str]:
    """The content of a checked message: one text, or those of its parts."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _check_message(path: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ParameterError(path, f"must be an object, got {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ParameterError(f"{path}.role", f"must be a non-empty string, got {shown(role)}")
    checked = {name: value for name, value in message.items() if value is not None}
    for name in ("name", "tool_call_id"):
        if not isinstance(checked.get(name, ""), str):
            raise ParameterError(f"{path}.{name}", f"must be a string, got {shown(checked[name])}")
    calls = checked.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = _check_tool_calls(f"{path}.tool_calls", calls)
    if "content" in checked:
        checked["content"] = _check_content(f"{path}.content", checked["content"])
    elif role == "assistant" and calls:
        checked["content"] = ""  # a template must never print the word None
    else:
        raise ParameterError(f"{path}.content", f"is required for role {shown(role)}")
    return checked


def _check_content(path: str, content: Any) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ParameterError(path, f"must be a string or a non-empty list of parts, got {shown(content)}")
    return [_check_part(f"{path}.{index}", part) for index, part in enumerate(content)]


def _check_part(path: str, part: Any) -> dict[str, str]:
    if not isinstance(part, dict):
        raise ParameterError(path, f"must be an object, got {shown(part)}")
    if part.get("type") != "text":
        raise ParameterError(f"{path}.type", f'only "text" is supported, got {shown(part.get("type"))}')
    if not isinstance(part.get("text"), str):
        raise ParameterError(f"{path}.text", f"must be a string, got {shown(part.get('text'))}")
    return {"type": "text", "text": part["text"]}


def _check_tool_calls(path: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ParameterError(path, f"must be a list, got {shown(calls)}")
    return [_check_tool_call(f"{path}.{index}", call) for index, call in enumerate(calls)]


def _check_tool_call(path: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ParameterError(path, f"must hold a function with a name, got {shown(call)}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        raise ParameterError(f"{path}.function.arguments", f"must be a JSON string, got {shown(arguments)}")
    try:
        json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise ParameterError(f"{path}.function.arguments", f"must be a JSON string, got {shown(arguments)}") from None
    return call
