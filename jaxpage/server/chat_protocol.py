"""Owns what clients may send to chat: the fields of POST /v1/chat/completions and how messages become a prompt.

It must not know how prompts are tokenized, how answers look or how the engine works.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxpage.checks import check_bool, check_int
from jaxpage.errors import ParameterError, shown
from jaxpage.params import BeamSearchParams, SamplingParams
from jaxpage.server.chat_setup import ChatSetup
from jaxpage.server.fields import Body, Limits, check_list, check_object, check_str, field
from jaxpage.server.messages import check_messages, texts
from jaxpage.server.protocol import GenerationRequest, Params, shared_fields
from jaxpage.server.sampling import generation_params
from jaxpage.server.structured import StructuredField, structured_field
from jaxpage.server.tools.definitions import Tools, check_tools
from jaxpage.server.tools.forced import forced_constraint, schema_error
from jaxpage.server.tools.parts import AnswerReader
from jaxpage.server.tools.strict import strict_constraint

MAX_TEMPLATE_LENGTH = 64 * 1024
"""Characters of a template in a request: compiling a larger one takes too long."""
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MESSAGE_CHARACTERS = 10
"""What a template takes for a message, in characters of its text."""
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """How messages become a prompt.

    Attributes:
        chat_template: used instead of the server's; None: the server's.
        chat_template_kwargs: further variables for the template.
        needed_variables: variables that the template must have a use for.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Tools
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]
    needed_variables: dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions.

    Attributes:
        includes_reasoning: what the model thought is part of the answer.
    """

    messages: list[dict[str, Any]]
    template: TemplateOptions
    setup: ChatSetup
    includes_reasoning: bool

    @property
    def tools(self) -> Tools:
        """The tools that may be called."""
        return self.template.tools

    def new_reader(self, opens_thoughts: bool) -> AnswerReader:
        """What reads the text of one choice; see ``ChatSetup.reader``."""
        return self.setup.reader(self.tools, self.structured_name is not None, opens_thoughts)

    def limit_calls(self, opens_thoughts: bool) -> None:
        """Lets a grammar see to strict tools where the model chooses; ``opens_thoughts``: the prompt ends within them.

        An answer that has to follow a grammar of the client's holds no calls.
        """
        if isinstance(self.params, SamplingParams) and self.structured_name is None and _may_call_strict(self.tools):
            self.params.structured_outputs = strict_constraint(self.tools, self.setup.form, opens_thoughts)

    def _num_characters(self) -> float:
        # A template of the client's, and what else it may write out, can take longer than the messages say.
        options = self.template
        if options.chat_template or options.chat_template_kwargs or options.needed_variables or self.tools.definitions:
            return math.inf
        if any(message.keys() - {"role", "content"} for message in self.messages):
            return math.inf
        return sum(MESSAGE_CHARACTERS + sum(map(len, texts(message))) for message in self.messages)

    @property
    def _constraint_name(self) -> str:
        if self.structured_name is not None:
            return super()._constraint_name
        return f"tool_choice {self.tools.choice}" if self.tools.is_forced else "tools that are strict"

    def _in_client_terms(self, error: ParameterError, check: Callable[[Params], None]) -> ParameterError:
        if self.structured_name is not None or not error.parameter.startswith("structured_outputs"):
            return super()._in_client_terms(error, check)
        return schema_error(
            self.tools, error, lambda constraint: check(dataclasses.replace(self.params, structured_outputs=constraint))
        )


def chat_request(body: Body, limits: Limits, setup: ChatSetup) -> ChatRequest:
    """The checked fields of a chat body.

    Raises:
        ParameterError: for the first field that is wrong or asks for something this server does not do.
    """
    messages = check_messages(body.get("messages"))
    _refuse_unsupported(body)
    template = check_template_options(body, setup)
    num_logprobs = _check_logprobs(body, limits)
    token_limits = [
        field(body, name, check_int, low=1, high=limits.max_model_len)
        for name in ("max_completion_tokens", "max_tokens")
    ]
    num_prompt_logprobs = field(body, "prompt_logprobs", check_int, low=-1)
    structured = structured_field(body)
    params = generation_params(
        body,
        limits,
        structured,
        max_tokens=next((value for value in token_limits if value is not None), None),
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )
    _force_tools(template.tools, params, structured)
    if setup.needs_special_tokens(template.tools):
        params.skip_special_tokens = False
    return ChatRequest(
        messages=messages,
        template=template,
        setup=setup,
        includes_reasoning=field(body, "include_reasoning", check_bool, True),
        echo=field(body, "echo", check_bool, False),
        add_special_tokens=field(body, "add_special_tokens", check_bool, False),
        **shared_fields(body, limits, params, structured, num_logprobs, num_prompt_logprobs),
    )


def check_template_options(body: Body, setup: ChatSetup) -> TemplateOptions:
    """The fields that say how messages become a prompt, also those of /tokenize.

    Raises:
        ParameterError: for wrong or contradicting ones, and for what the server was not started for.
    """
    tools = check_tools(body)
    if tools.choice == "auto" and not setup.chooses_tools:
        raise ParameterError("tool_choice", "auto is switched off: the server has --no-enable-auto-tool-choice")
    chat_template = field(body, "chat_template", check_str)
    if chat_template is not None and not setup.trusts_templates:
        raise ParameterError("chat_template", "templates in requests need a server with --trust-request-chat-template")
    if chat_template is not None and not 1 <= len(chat_template) <= MAX_TEMPLATE_LENGTH:
        limits = f"must have 1 to {MAX_TEMPLATE_LENGTH} characters"
        raise ParameterError("chat_template", f"{limits}, got {len(chat_template)}")
    continues = field(body, "continue_final_message", check_bool, False)
    opens = field(body, "add_generation_prompt", check_bool)
    if continues and opens:
        raise ParameterError("continue_final_message", "cannot be combined with add_generation_prompt true")
    extra = field(body, "chat_template_kwargs", check_object, {})
    for name in _RESERVED:
        if name in extra:
            raise ParameterError("chat_template_kwargs", f"may not set {name}")
    needed = {
        "reasoning_effort": field(body, "reasoning_effort", _check_effort),
        "documents": field(body, "documents", check_list),
    }
    return TemplateOptions(
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        tools=tools,
        chat_template=chat_template,
        chat_template_kwargs=extra,
        needed_variables={name: value for name, value in needed.items() if value is not None},
    )


def _check_logprobs(body: Body, limits: Limits) -> int | None:
    """Alternatives shown for each token; None shows no logprobs at all."""
    is_shown = field(body, "logprobs", check_bool, False)
    limit = limits.vocab_size if limits.max_logprobs == -1 else min(limits.max_logprobs, limits.vocab_size)
    top = field(body, "top_logprobs", check_int, low=-1 if limits.max_logprobs == -1 else 0, high=limit)
    if top and not is_shown:
        raise ParameterError("top_logprobs", f"needs logprobs true, got {top} without it")
    return (top or 0) if is_shown else None


def _force_tools(tools: Tools, params: Params, structured: StructuredField | None) -> None:
    """Lets the grammar see to it that forced tools are called."""
    if isinstance(params, BeamSearchParams) and _may_call_strict(tools):
        index = tools.names.index(next(iter(tools.strict_schemas)))
        raise ParameterError(f"tools.{index}.function.strict", "true cannot be combined with use_beam_search")
    if not tools.is_forced:
        return
    if isinstance(params, BeamSearchParams):
        raise ParameterError("tool_choice", f"{tools.choice} cannot be combined with use_beam_search")
    if structured is not None:
        raise ParameterError(structured.name.split(".")[0], f"cannot be combined with tool_choice {tools.choice}")
    params.structured_outputs = forced_constraint(tools)


def _may_call_strict(tools: Tools) -> bool:
    return tools.choice == "auto" and bool(tools.strict_schemas)


def _refuse_unsupported(body: Body) -> None:
    """What only chat has and this server has not."""
    if field(body, "store", check_bool, False):
        raise ParameterError("store", "is not supported: answers are not kept")
    if body.get("service_tier") not in (None, "auto", "default"):
        raise ParameterError("service_tier", f'only "auto" and "default" exist, got {shown(body["service_tier"])}')
    if body.get("verbosity") not in (None, "medium"):
        raise ParameterError("verbosity", f'only "medium" is supported, got {shown(body["verbosity"])}')


def _check_effort(name: str, value: Any) -> str:
    if value not in REASONING_EFFORTS:
        raise ParameterError(name, f"must be one of {', '.join(REASONING_EFFORTS)}, got {shown(value)}")
    return value
