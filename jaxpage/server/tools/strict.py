"""Owns the grammar of answers where the model chooses: text as it likes, calls of strict tools by their schemas.

It must not know how grammars are compiled. It mirrors the readers: what it takes for text, no reader takes for a call.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxpage.params import SchemaGrammar, StructuredOutputsParams
from jaxpage.server import reasoning
from jaxpage.server.tools import hermes
from jaxpage.server.tools.call_reader import USUAL_KEYS
from jaxpage.server.tools.definitions import Tools
from jaxpage.server.tools.json_default import SEPARATORS
from jaxpage.server.tools.llama3_json import PYTHON_TAG
from jaxpage.server.tools.llama3_json import SEPARATORS as LLAMA3_SEPARATORS

_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_SPACE: Final = r"\s\x1c-\x1f"
_SPACES: Final = f"[{_SPACE}]*"
"""What ``str.strip`` takes away."""


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """How a model writes.

    Attributes:
        parser: the format of its calls, a key of ``TOOL_PARSERS``.
        thinks: what stands in ``<think>`` at the start is no part of the answer.
        special_ids: ids of the markers that are special tokens. Other special tokens are not allowed where a grammar
            holds: whether they are text at all, and break a marker in two, depends on what the client wants to see.
    """

    parser: str
    thinks: bool
    special_ids: Mapping[str, int]


def strict_constraint(tools: Tools, form: AnswerForm, opens_thoughts: bool) -> StructuredOutputsParams:
    """What the text has to be; ``opens_thoughts``: the prompt ends within thoughts."""
    return StructuredOutputsParams(schema_grammar=_Grammar(tools, form).build(opens_thoughts))


class _Grammar:
    """Puts the rules together.

    An answer is ``first`` where it begins the text, and ``rest`` behind thoughts. Terminals of free text that stand
    first are without those texts that begin with a marker, for markers have rules of their own.
    """

    def __init__(self, tools: Tools, form: AnswerForm) -> None:
        self._tools = tools
        self._form = form
        self._rules: list[str] = ["TEXT: /(?s:.*)/"]

    def build(self, opens_thoughts: bool) -> SchemaGrammar:
        schemas = self._calls(self._add_answers(may_think=self._form.thinks and not opens_thoughts))
        if not self._form.thinks:
            self._add("start: first")
            return SchemaGrammar(grammar="\n".join(self._rules), schemas=schemas)
        close = _pattern(reasoning.CLOSE)
        self._add_up_to("closing", "TEXT", reasoning.CLOSE)
        self._add(
            "thoughts: closing rest | UNCLOSED",
            f"UNCLOSED: TEXT & ~/(?s:.*){close}(?s:.*)/",
            f"opening: {self._behind_spaces(reasoning.OPEN)}",
            "start: thoughts" if opens_thoughts else "start: first | opening thoughts",
        )
        return SchemaGrammar(grammar="\n".join(self._rules), schemas=schemas)

    def _add_answers(self, may_think: bool) -> str:
        """The rules of ``first`` and ``rest``; gives the pattern of what may stand before a call's brace."""
        if self._form.parser == "hermes":
            self._add_marked(may_think)
            return ""
        is_llama = self._form.parser == "llama3_json"
        # Of spaces readers pass over all kinds behind thoughts, and some between calls: here it is all everywhere.
        between = f"[{re.escape(LLAMA3_SEPARATORS if is_llama else SEPARATORS)}{_SPACE}]*"
        self._add_bare(between, may_think, PYTHON_TAG if is_llama else None)
        return between

    def _add_marked(self, may_think: bool) -> None:
        """Text with marked calls anywhere in it."""
        open_, close = _pattern(hermes.OPEN), _pattern(hermes.CLOSE)
        self._add(f"FIRST: TEXT{_no_start([reasoning.OPEN] if may_think else [])}")
        self._add_up_to("first_open", "FIRST", hermes.OPEN)
        self._add_up_to("open", "TEXT", hermes.OPEN)
        line_end = r"/\n?/"
        more = "(open marked)* TEXT" if self._tools.parallel else "TAIL"
        self._add(
            "first: FIRST | first_open calls",
            "rest: TEXT | open calls",
            f"calls: marked {more}",
            f"TAIL: TEXT & ~/(?s:.*){open_}(?s:.*)/",
            # Blanks are few: a model that loves them cannot get lost in them.
            f"marked: /[ \\n]{{0,2}}/ call ({line_end} /{close}/{self._or_special(line_end, hermes.CLOSE)})",
        )

    def _add_bare(self, between: str, may_think: bool, tag: str | None) -> None:
        """Calls and then text. Text is what does not begin like a call, and from there on anything."""
        inside = between.removesuffix("*")[1:-1]
        tags = [] if tag is None else [tag]
        keys = "|".join(USUAL_KEYS)
        tagged = "" if tag is None else " | tag (calls | REST | OBJECT)"
        self._add(
            f"PLAIN: /{between}([^{inside}{{](?s:.*))?/",
            f'OBJECT: /{between}\\{{[ \\t\\r\\n]*/ (/[^" \\t\\r\\n](?s:.*)/ | OTHER_KEY /(?s:.*)/)',
            f'OTHER_KEY: /"[^"\\\\\\x00-\\x1f]*"/ & ~/"({keys})"/',
            f"FIRST: PLAIN{_no_start([*tags, *([reasoning.OPEN] if may_think else [])])}",
            f"REST: PLAIN{_no_start(tags)}",
            f"first: FIRST | OBJECT | calls{tagged}",
            f"rest: REST | OBJECT | calls{tagged}",
            f"calls: {'call+' if self._tools.parallel else 'call'} (PLAIN | OBJECT)",
        )
        if tag is not None:
            self._add(f"tag: {self._behind_spaces(tag)}")

    def _calls(self, before: str) -> list[dict[str, Any]]:
        """The rule ``call`` of any tool on offer; gives the schemas it names."""
        strict = [(name, schema) for name, schema in self._tools.strict_schemas.items()]
        options = [f"HEAD_{index} schema_{index}" for index in range(len(strict))]
        heads = [re.escape(name) for name, _ in strict]
        schemas = [schema for _, schema in strict]
        if others := [name for name in self._tools.names if name not in self._tools.strict_schemas]:
            options.append(f"HEAD_{len(heads)} schema_{len(heads)}")
            heads.append("|".join(map(re.escape, others)))
            schemas.append(_ANY_OBJECT)
        self._add(f'call: ({" | ".join(options)}) "}}"')
        for index, names in enumerate(heads):
            # Some models of the Llama family say that it is a function.
            head = f'\\{{ ?("type": ?"function", ?)?"name": ?"({names})", ?"(arguments|parameters)": ?'
            self._add(f"HEAD_{index}: /{before}{head}/")
        return schemas

    def _add(self, *rules: str) -> None:
        self._rules += rules

    def _add_up_to(self, name: str, text: str, marker: str) -> None:
        """A rule for free text with the first marker at its end."""
        self._add(f"{name}: {name}_written{self._or_special(text, marker)}")
        self._add(f"{name}_written[lazy]: {text} {json.dumps(marker)}")

    def _behind_spaces(self, marker: str) -> str:
        return f"/{_SPACES}{_pattern(marker)}/{self._or_special(f'/{_SPACES}/', marker)}"

    def _or_special(self, before: str, marker: str) -> str:
        """The alternative with the marker as the special token that it is, if it is one."""
        token_id = self._form.special_ids.get(marker)
        return "" if token_id is None else f" | {before} <[{token_id}]>"


def _pattern(marker: str) -> str:
    return re.escape(marker).replace("/", r"\/")


def _no_start(markers: Sequence[str]) -> str:
    """Takes the texts out of a terminal that begin with one of ``markers``, spaces apart."""
    return "".join(f" & ~/{_SPACES}{_pattern(marker)}(?s:.*)/" for marker in markers)
