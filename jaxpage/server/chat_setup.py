"""Owns how the served model chats: its template, the format of its calls and of its thoughts, chosen at the start.

It must not know HTTP or single requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxpage.server import reasoning
from jaxpage.server.options import ServerOptions
from jaxpage.server.reasoning import ThinkReader
from jaxpage.server.tools import hermes
from jaxpage.server.tools.definitions import Tools
from jaxpage.server.tools.forced import forced_reader
from jaxpage.server.tools.hermes import HermesReader
from jaxpage.server.tools.json_default import JsonReader
from jaxpage.server.tools.llama3_json import PYTHON_TAG, Llama3JsonReader
from jaxpage.server.tools.parts import AnswerReader, ContentReader
from jaxpage.server.tools.strict import AnswerForm
from jaxpage.tokenizer.chat_template import ChatTemplateError, ContentFormat, compile_template

ToolParser = Callable[[Collection[str]], AnswerReader]

TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": lambda names: HermesReader(),
    "llama3_json": Llama3JsonReader,
    "json": JsonReader,
}
"""Readers of calls in an answer, made for the names of the tools on offer."""
CONTENT_FORMATS: dict[str, ContentFormat | None] = {"auto": None, "string": "string", "openai": "parts"}
"""vLLM's names of the forms in which templates read content."""


class ChatSetup:
    """How the served model chats.

    Args:
        tokenizer: has the model's own template, and knows which markers are special tokens.
        options: what was chosen at the start.

    Attributes:
        content_format: how templates read content; None: as they show.
        trusts_templates: requests may bring templates of their own.
        chooses_tools: the model may be left to choose whether it calls a tool.
        form: how the model writes its answers.
    """

    def __init__(self, tokenizer: Any, options: ServerOptions) -> None:
        self.content_format = CONTENT_FORMATS[options.chat_template_content_format]
        self.trusts_templates = options.trust_request_chat_template
        self.chooses_tools = options.enable_auto_tool_choice
        self._tokenizer = tokenizer
        self._template = options.chat_template
        self._explains_tools = options.tool_prompt == "auto"
        self._thinks = options.reasoning_parser == "think"
        name = options.tool_call_parser
        self._parser_name = _fitting_parser(self.template([{}]) or "") if name == "auto" else name
        self._hides_calls = not _survive(tokenizer, HermesReader.markers) and self._parser_name == "hermes"
        self._hides_thoughts = not _survive(tokenizer, ThinkReader.markers) and self._thinks
        markers = (*HermesReader.markers, *ThinkReader.markers, PYTHON_TAG)
        special_ids = {marker: found for marker in markers if (found := _special_id(tokenizer, marker)) is not None}
        self.form = AnswerForm(self._parser_name, self._thinks, special_ids)

    def template(self, tools: Sequence[Any] | None) -> str | None:
        """The template that is used unless a request brings its own."""
        return self._template or self._tokenizer.chat_template_for(tools)

    def explains_tools(self, template: str | None) -> bool:
        """True if tools have to be explained in a message, as ``template`` has no place for them."""
        return self._explains_tools and "tools" not in template_variables(template)

    def reader(self, tools: Tools, is_constrained: bool, opens_thoughts: bool) -> AnswerReader:
        """What reads the text of one choice.

        Args:
            is_constrained: the text has to follow a grammar, from its first character on: it holds no thoughts, and
                no calls unless it is made of them.
            opens_thoughts: the prompt ends within thoughts.
        """
        if tools.is_forced:
            return forced_reader(tools)
        if is_constrained:
            return ContentReader()
        answer = TOOL_PARSERS[self._parser_name](tools.names) if tools.choice == "auto" else ContentReader()
        return ThinkReader(answer, opens_thoughts) if self._thinks else answer

    def needs_special_tokens(self, tools: Tools) -> bool:
        """True if the readers' markers are special tokens of this model, which must not be skipped then."""
        return self._hides_thoughts or (self._hides_calls and tools.choice == "auto")

    def opens_thoughts(self, prompt: str, continued: str) -> bool:
        """True if an answer to ``prompt``, or the end of the message ``continued``, starts with thoughts."""
        return self._thinks and reasoning.ends_within_thoughts(prompt, continued)


def template_variables(template: str | None) -> frozenset[str]:
    """Names of the variables that a template reads; none for a template that is no template."""
    try:
        return compile_template(template or "").variables
    except ChatTemplateError:
        return frozenset()  # whoever renders it gets the error


def _fitting_parser(template: str) -> str:
    """The format that ``template`` teaches."""
    if hermes.OPEN in template or "tools" not in template_variables(template):
        return "hermes"  # also that of the explanation for models whose templates know no tools
    return "llama3_json" if '"parameters"' in template and "ipython" in template else "json"


def _special_id(tokenizer: Any, marker: str) -> int | None:
    """The id of ``marker`` if it is a special token."""
    token_ids = tokenizer.encode(marker, add_special_tokens=False)
    is_special = len(token_ids) == 1 and not tokenizer.decode(token_ids, skip_special_tokens=True)
    return token_ids[0] if is_special else None


def _survive(tokenizer: Any, markers: Sequence[str]) -> bool:
    return all(
        tokenizer.decode(tokenizer.encode(marker, add_special_tokens=False), skip_special_tokens=True) == marker
        for marker in markers
    )
