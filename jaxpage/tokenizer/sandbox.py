"""Owns the Jinja environment for chat templates: Hugging Face's dialect, fenced in and with bounded time and memory.

Must not know of tokenizers or of the shape of messages.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Sized
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS: Final = 1 << 24
"""Longest text or list that a template may build."""
MAX_NUMBER: Final = 100_000
"""Largest number that a template may pass to a function (widths, ranges); also the sandbox's own limit of range()."""
MAX_CPU_S: Final = 0.8
"""CPU seconds of the rendering thread that one rendering may take; looked at in every loop and macro."""
_MAX_BITS: Final = 4096
_WIDE_PERCENT: Final = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)")
_WIDE_BRACES: Final = re.compile(r"\{[^{}]*(\d{6}|\{)")
_UNNEEDED_FILTERS: Final = ("batch", "center", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
_render = threading.local()


class TemplateRefusal(jinja2.TemplateError):
    """A template called raise_exception."""


def _require(fine: bool, what: str) -> None:
    if not fine:
        raise SecurityError(f"the chat template {what}")


def _require_size(chars: int) -> None:
    _require(chars <= MAX_CHARS, f"builds more than {MAX_CHARS} characters")


def _tick() -> str:
    _require(time.thread_time() <= _render.deadline, f"runs for more than {MAX_CPU_S} s")
    return ""


def _concat(parts: Iterable[str]) -> str:
    kept = []
    size = 0
    for part in parts:
        size += len(part)
        _require_size(size)
        kept.append(part)
    return "".join(kept)


def _join_texts(*parts: Any) -> str:
    """What the operator ~ does, with None as nothing."""
    return _concat("" if part is None else str(part) for part in parts)


def _check_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses calls of str methods whose result is far larger than what goes in."""
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    _require(
        not any(isinstance(arg, int) and arg > MAX_NUMBER for arg in (*args, *kwargs.values())), "uses big numbers"
    )
    if not isinstance(text, str):
        return
    if name == "replace":
        _check_replace(text, *args)
    elif name == "join" and args:
        _check_join(args[0], text)


def _check_replace(text: str, old: str = "", new: str = "", *_: Any) -> None:
    _require_size(len(text) + text.count(old) * len(new))


def _check_join(values: Any, separator: str) -> None:
    if isinstance(values, Sized):
        _require_size(len(values) * (len(separator) + 1))


class _Fence(NodeTransformer):
    """Puts a look at the clock into every loop and macro, and bounds the operator ~."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join_texts", node.nodes, node.lineno)

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([_call("tick", [], node.lineno)], lineno=node.lineno))
        return node


def _call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=lineno)


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training; rendering just writes the body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))
    tick = staticmethod(_tick)
    join_texts = staticmethod(_join_texts)
    concat = staticmethod(_concat)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**":
                _require(left.bit_length() * max(right, 0) <= _MAX_BITS, "uses too large a power")
            elif operator == "*":
                _require(left.bit_length() + right.bit_length() <= _MAX_BITS, "uses too large numbers")
        elif operator == "%" and isinstance(left, str):
            _require(not _WIDE_PERCENT.search(left), "formats too wide")
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _require_size(len(left) + len(right))
        elif operator == "*":
            times, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(value, Sized):
                _require_size(times * len(value))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _require(not _WIDE_BRACES.search(value.__self__.replace("{{", "")), "formats too wide")
        return wrapped

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj is not _tick and __obj is not _join_texts:
            _check_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    """JSON without HTML escapes, other than jinja2's own filter."""
    _require(indent is None or len(str(indent)) < 3, "indents too far")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _guarded(filter_function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Runs `check(value, *args)` before a filter; the filter's own leading argument (eval context) is passed by."""

    @functools.wraps(filter_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        skip = 1 if hasattr(filter_function, "jinja_pass_arg") else 0
        check(*args[skip:], **kwargs)
        return filter_function(*args, **kwargs)

    return call


def _check_filter_join(value: Any, d: str = "", attribute: Any = None) -> None:
    _check_join(value, d)


def _check_filter_replace(s: Any, old: str = "", new: str = "", count: Any = None) -> None:
    _check_replace(str(s), str(old), str(new))


def _check_filter_indent(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    _require_size(len(s) + (s.count("\n") + 1) * (width if isinstance(width, int) else len(width)))


def _check_filter_format(value: Any, *_: Any, **__: Any) -> None:
    _require(not _WIDE_PERCENT.search(str(value)), "formats too wide")


@functools.lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    # None (content of a message with tool calls) is nothing wherever it would be written out.
    environment.finalize = lambda value: "" if value is None else value
    filters: dict[str, Callable[..., Any]] = environment.filters  # pyright: ignore[reportAssignmentType]
    for name in _UNNEEDED_FILTERS:
        filters.pop(name, None)
    checks = {
        "join": _check_filter_join,
        "replace": _check_filter_replace,
        "indent": _check_filter_indent,
        "format": _check_filter_format,
    }
    for name, check in checks.items():
        filters[name] = _guarded(filters[name], check)
    for name in ("trim", "string"):
        filters[name] = functools.partial(_none_as_empty, filters[name])
    filters["tojson"] = _tojson
    environment.globals.pop("lipsum", None)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _none_as_empty(filter_function: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    return filter_function("" if value is None else value, *args, **kwargs)


def parse(source: str) -> nodes.Template:
    """Returns the syntax tree of a template; raises jinja2.TemplateSyntaxError."""
    return _environment().parse(source)


def compile_tree(tree: nodes.Template) -> jinja2.Template:
    """Compiles a syntax tree (which this changes) with all fences in it."""
    environment = _environment()
    code = environment.compile(_Fence().visit(tree))
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Renders; whatever goes wrong inside the template comes out as its own exception."""
    _render.deadline = time.thread_time() + MAX_CPU_S
    return template.render(variables)
