"""Owns turning chat messages into prompt text by a model's Jinja template.

Must not know of token ids or HTTP: messages come in as plain dictionaries, text goes out.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import jinja2
from jinja2 import nodes

from jaxpage.errors import ParameterError, shown
from jaxpage.tokenizer import sandbox

ContentFormat = Literal["string", "parts"]
_RESERVED: Final = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))


class ChatTemplateError(ValueError):
    """A template is missing, malformed, refuses the messages or fails on them; the text is the template's own."""


class ChatTemplate(NamedTuple):
    """A compiled template, the form in which it reads message content, and all names of variables that it reads."""

    template: jinja2.Template
    content_format: ContentFormat
    variables: frozenset[str]


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """Compiles a template; the same source is compiled once.

    Raises:
        ChatTemplateError: the source is not valid Jinja.
    """
    try:
        tree = sandbox.parse(source)
        content_format = _content_format(tree)
        variables = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
        return ChatTemplate(sandbox.compile_tree(tree), content_format, variables)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"{error.message} (line {error.lineno} of the chat template)") from error
    except (RecursionError, jinja2.TemplateError, SyntaxError) as error:
        raise ChatTemplateError(str(error)) from error


def _content_format(tree: nodes.Template) -> ContentFormat:
    """Tells how a template reads `content`.

    A template that loops over `message.content` itself (or a variable set to it, or one named `content`) reads lists of
    parts. All others expect a string.
    """
    holders = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set()):
            holders.add(assign.target.name)
    return "parts" if any(_is_content(loop.iter, holders) for loop in tree.find_all(nodes.For)) else "string"


def _is_content(node: nodes.Node, holders: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in holders


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    content_format: ContentFormat | None = None,
) -> str:
    """Renders `messages` with the template `source`.

    Content that is a list of text parts is joined by newlines for templates that expect strings and passed on to those
    that walk it; a string is passed on as it is. Arguments of tool calls that are JSON text are passed as objects.
    Content None is written as nothing.

    Args:
        source: the Jinja template.
        messages: at least role and content each; they are not changed.
        special_tokens: `bos_token` and the like, with their text.
        tools: passed to the template.
        add_generation_prompt: whether the template opens the assistant's turn.
        continue_final_message: whether the prompt ends exactly in the last message's text.
        variables: further variables of the template; they may replace any but those named above.
        content_format: how the template reads content, for those that do not show it; "parts" then turns strings into
            lists of one part. None: as the template shows.

    Raises:
        ChatTemplateError: the template refuses or fails.
        ParameterError: messages or variables are malformed, or both flags are set.
    """
    if add_generation_prompt and continue_final_message:
        raise ParameterError("continue_final_message", "cannot be combined with add_generation_prompt")
    if taken := _RESERVED.intersection(variables or ()):
        raise ParameterError("chat_template_kwargs", f"may not set {', '.join(sorted(taken))}")
    compiled = compile_template(source)
    shape = content_format or compiled.content_format
    prepared = [_prepare(message, f"messages[{i}]", shape) for i, message in enumerate(messages)]
    if content_format == "parts":
        for message in prepared:
            if isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
    mark = ""
    if continue_final_message:
        mark = f"<{secrets.token_hex(16)}>"
        _mark_end(prepared, mark)
    scope = {
        **special_tokens,
        "documents": None,
        **(variables or {}),
        "messages": prepared,
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = sandbox.render(compiled.template, scope)
    except Exception as error:  # a template can fail in any way, and each is a verdict on the request
        raise ChatTemplateError(str(error) or type(error).__name__) from error
    if not mark:
        return text
    end = text.rfind(mark)
    if end < 0:
        raise ChatTemplateError("continue_final_message: the chat template does not write the final message")
    return text[:end].replace(mark, "")


def _prepare(message: Mapping[str, Any], path: str, content_format: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ParameterError(path, f"expected an object, got {shown(message)}")
    prepared = dict(message)
    content = prepared.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = list(_part_texts(content, f"{path}.content"))
        prepared["content"] = "\n".join(texts) if content_format == "string" else [dict(part) for part in content]
    elif content is not None and not isinstance(content, str):
        raise ParameterError(f"{path}.content", f"expected a string or a list of parts, got {shown(content)}")
    if prepared.get("tool_calls"):
        calls = prepared["tool_calls"]
        prepared["tool_calls"] = [_with_object(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return prepared


def _part_texts(parts: Sequence[Any], path: str) -> Iterator[str]:
    if not parts:
        raise ParameterError(path, "an empty list of parts")
    for i, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise ParameterError(f"{path}[{i}]", f"expected an object, got {shown(part)}")
        if part.get("type") != "text":
            raise ParameterError(f"{path}[{i}].type", f"only 'text' is supported, got {shown(part.get('type'))}")
        if not isinstance(part.get("text"), str):
            raise ParameterError(f"{path}[{i}].text", f"expected a string, got {shown(part.get('text'))}")
        yield part["text"]


def _with_object(call: Any, path: str) -> Any:
    """Returns a tool call whose arguments are an object, which is what templates expect; over HTTP they are JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{path}.function.arguments", f"not JSON: {shown(function['arguments'])}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(messages: list[dict[str, Any]], mark: str) -> None:
    """Appends `mark` to the text of the last message, so that the end of that text can be found after rendering."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + mark
    elif content:
        messages[-1]["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    else:
        raise ParameterError("continue_final_message", "needs a final message that has content")
