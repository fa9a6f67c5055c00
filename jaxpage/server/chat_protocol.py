"""Owns what clients may send to chat: the fields of POST /v1/chat/completions and how messages become a prompt.

It must not know how prompts are tokenized, how answers look or how the engine works.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxpage.errors import ParameterError, shown
from jaxpage.request import BeamSearchParams, check_bool, check_int
from jaxpage.server.chat_setup import ChatSetup
from jaxpage.server.fields import Body, Limits, check_list, check_object, check_str, field
from jaxpage.server.messages import check_messages
from jaxpage.server.protocol import GenerationRequest, Params, shared_fields
from jaxpage.server.sampling import generation_params
from jaxpage.server.structured import structured_name
from jaxpage.server.tools.definitions import Tools, check_tools
from jaxpage.server.tools.forced import forced_constraint, forced_error
from jaxpage.server.tools.parts import AnswerReader

MAX_TEMPLATE_LENGTH = 64 * 1024
"""Characters of a template in a request: compiling a larger one takes too long."""
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
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
        is_constrained = not isinstance(self.params, BeamSearchParams) and self.params.structured_outputs is not None
        return self.setup.reader(self.tools, is_constrained, opens_thoughts)

    def _in_client_terms(self, error: ParameterError, check: Callable[[Params], None]) -> ParameterError:
        if not self.tools.is_forced or not error.parameter.startswith("structured_outputs"):
            return super()._in_client_terms(error, check)
        return forced_error(
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
    params = generation_params(
        body,
        limits,
        max_tokens=next((value for value in token_limits if value is not None), None),
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )
    _force_tools(template.tools, params, body)
    if setup.needs_special_tokens(template.tools):
        params.skip_special_tokens = False
    return ChatRequest(
        messages=messages,
        template=template,
        setup=setup,
        includes_reasoning=field(body, "include_reasoning", check_bool, True),
        echo=field(body, "echo", check_bool, False),
        add_special_tokens=field(body, "add_special_tokens", check_bool, False),
        **shared_fields(body, limits, params, num_logprobs, num_prompt_logprobs),
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


def _force_tools(tools: Tools, params: Params, body: Body) -> None:
    """Lets the grammar see to it that forced tools are called."""
    if not tools.is_forced:
        return
    if isinstance(params, BeamSearchParams):
        raise ParameterError("tool_choice", f"{tools.choice} cannot be combined with use_beam_search")
    if params.structured_outputs is not None:
        name = structured_name(body) or "response_format"
        raise ParameterError(name.split(".")[0], f"cannot be combined with tool_choice {tools.choice}")
    params.structured_outputs = forced_constraint(tools)


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
