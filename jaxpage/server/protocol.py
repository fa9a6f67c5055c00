"""Owns what clients may send: the fields of each endpoint, their types, ranges and defaults.

It must not know how prompts are tokenized, how answers look or how the engine works.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxpage.errors import ParameterError, shown
from jaxpage.request import BeamSearchParams, SamplingParams, check_bool, check_cache_salt, check_int, check_token_ids
from jaxpage.server.fields import Body, Limits, check_list, check_object, check_str, field
from jaxpage.server.messages import check_messages
from jaxpage.server.sampling import generation_params

MAX_PROMPTS = 1024
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclasses.dataclass(kw_only=True)
class GenerationRequest:
    """The fields both generating endpoints share.

    Attributes:
        params: BeamSearchParams if the client wants beams, whose ``beam_width`` it calls n.
        num_logprobs: alternatives shown for each token; None shows no logprobs at all.
        num_prompt_logprobs: the same for the list ``prompt_logprobs``.
        truncate_prompt_tokens: most tokens a prompt may keep, or None.
        stream_interval: tokens in one chunk.
    """

    model: str | None
    params: SamplingParams | BeamSearchParams
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stream_interval: int
    tokens_as_ids: bool
    return_token_ids: bool
    add_special_tokens: bool
    truncate_prompt_tokens: int | None
    truncation_side: str
    cache_salt: str | None
    priority: int
    request_id: str | None

    @property
    def num_choices(self) -> int:
        """Choices of each prompt: samples or beams."""
        return self.params.n if isinstance(self.params, SamplingParams) else self.params.beam_width

    @property
    def scores_prompts(self) -> bool:
        """True when the engine is asked for scores of the prompts."""
        return isinstance(self.params, SamplingParams) and self.params.prompt_logprobs is not None


@dataclasses.dataclass(kw_only=True)
class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompts: list[str | list[int]]


@dataclasses.dataclass(kw_only=True)
class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]


def completion_request(body: Body, limits: Limits) -> CompletionRequest:
    """The checked fields of a completions body.

    Raises:
        ParameterError: for the first field that is wrong or asks for something this server does not do.
    """
    if field(body, "suffix", check_str):
        raise ParameterError("suffix", "is not supported")
    prompts = check_prompts(body, limits)
    echo = field(body, "echo", check_bool, False)
    num_logprobs = field(body, "logprobs", check_int, low=-1)
    # No new tokens is only of use to score an echoed prompt.
    max_tokens = field(body, "max_tokens", check_int, 16, low=0 if echo else 1, high=limits.max_model_len)
    num_prompt_logprobs = field(body, "prompt_logprobs", check_int, low=-1)
    params = generation_params(
        body,
        limits,
        max_tokens=max_tokens,
        logprobs=num_logprobs,
        # Echoed prompts are scored like generated tokens; one computation serves both lists.
        prompt_logprobs=_widest(num_logprobs if echo else None, num_prompt_logprobs),
    )
    shared = _shared_fields(body, limits, params, num_logprobs, num_prompt_logprobs)
    add_special_tokens = field(body, "add_special_tokens", check_bool, True)
    return CompletionRequest(prompts=prompts, echo=echo, add_special_tokens=add_special_tokens, **shared)


def chat_request(body: Body, limits: Limits) -> ChatRequest:
    """The checked fields of a chat body; errors as in ``completion_request``."""
    messages = check_messages(body.get("messages"))
    shown_logprobs = field(body, "logprobs", check_bool, False)
    limit = limits.vocab_size if limits.max_logprobs == -1 else min(limits.max_logprobs, limits.vocab_size)
    top = field(body, "top_logprobs", check_int, low=-1 if limits.max_logprobs == -1 else 0, high=limit)
    if top and not shown_logprobs:
        raise ParameterError("top_logprobs", f"needs logprobs true, got {top} without it")
    num_logprobs = (top or 0) if shown_logprobs else None
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
    return ChatRequest(
        messages=messages,
        echo=field(body, "echo", check_bool, False),
        add_special_tokens=field(body, "add_special_tokens", check_bool, False),
        **chat_options(body),
        **_shared_fields(body, limits, params, num_logprobs, num_prompt_logprobs),
    )


def _shared_fields(
    body: Body,
    limits: Limits,
    params: SamplingParams | BeamSearchParams,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> dict[str, Any]:
    _refuse_unsupported(body)
    field(body, "user", check_str)
    stream = field(body, "stream", check_bool, False)
    if stream and num_prompt_logprobs is not None:
        raise ParameterError("prompt_logprobs", "cannot be combined with stream")
    options = field(body, "stream_options", check_object)
    if options is not None and not stream:
        raise ParameterError("stream_options", "is only allowed with stream true")
    include_usage, continuous_usage = (
        False if (options or {}).get(name) is None else check_bool(f"stream_options.{name}", (options or {})[name])
        for name in ("include_usage", "continuous_usage_stats")
    )
    return {
        "model": field(body, "model", check_str),
        "params": params,
        "num_logprobs": num_logprobs,
        "num_prompt_logprobs": num_prompt_logprobs,
        "stream": stream,
        "include_usage": include_usage,
        "continuous_usage": include_usage and continuous_usage,
        "stream_interval": field(body, "stream_interval", check_int, 1, low=1),
        "tokens_as_ids": field(body, "return_tokens_as_token_ids", check_bool, False),
        "return_token_ids": field(body, "return_token_ids", check_bool, False),
        "truncate_prompt_tokens": field(body, "truncate_prompt_tokens", _check_truncation, limits=limits),
        "truncation_side": field(body, "truncation_side", _check_side, "left"),
        "cache_salt": field(body, "cache_salt", check_cache_salt),
        "priority": field(body, "priority", check_int, 0, low=-(2**63), high=2**63 - 1),
        "request_id": field(body, "request_id", _check_request_id),
    }


def check_prompts(body: Body, limits: Limits) -> list[str | list[int]]:
    """``prompt`` in any of its four shapes as a list of prompts.

    Raises:
        ParameterError: naming the first bad index.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise ParameterError("prompt", f"must be text, token ids or a list of either, got {shown(prompt)}")
    if not prompt:
        raise ParameterError("prompt", "must not be empty")
    if not isinstance(prompt[0], (str, list)):
        return [_prompt_ids("prompt", prompt, body, limits)]
    if len(prompt) > MAX_PROMPTS:
        raise ParameterError("prompt", f"holds {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed")
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise ParameterError(f"prompt[{index}]", f"prompts must be of one kind, got {shown(item)}")
    if kind is str:
        return list(prompt)
    return [_prompt_ids(f"prompt[{index}]", item, body, limits) for index, item in enumerate(prompt)]


def _prompt_ids(name: str, ids: list[Any], body: Body, limits: Limits) -> list[int]:
    if not ids:
        raise ParameterError(name, "must hold at least one token")
    # Length first: a list that cannot be served is not worth looking at item by item.
    if body.get("truncate_prompt_tokens") is None and len(ids) >= limits.max_model_len:
        raise too_long(name, str(len(ids)), limits.max_model_len)
    return check_token_ids(name, ids, limits.vocab_size)


def too_long(name: str, num_tokens: str, max_model_len: int) -> ParameterError:
    """The error for a prompt that leaves no room for a token; ``num_tokens`` may say "at least N"."""
    return ParameterError(
        name, f"the prompt has {num_tokens} tokens, but max_model_len is {max_model_len} with the answer included"
    )


def chat_options(body: Body) -> dict[str, Any]:
    """The fields that say how messages become text, also those of /tokenize.

    Raises:
        ParameterError: for wrong or contradicting ones, templates in requests, and tools.
    """
    _refuse_tools(body)
    if body.get("chat_template") is not None:
        raise ParameterError("chat_template", "templates in requests are not allowed by this server")
    continues = field(body, "continue_final_message", check_bool, False)
    opens = field(body, "add_generation_prompt", check_bool)
    if continues and opens:
        raise ParameterError("continue_final_message", "cannot be combined with add_generation_prompt true")
    extra = field(body, "chat_template_kwargs", check_object, {})
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"):
        if name in extra:
            raise ParameterError("chat_template_kwargs", f"may not set {name}")
    return {
        "add_generation_prompt": not continues if opens is None else opens,
        "continue_final_message": continues,
        "chat_template_kwargs": extra,
    }


UNSUPPORTED_FIELDS = (
    "audio",
    "function_call",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "lora_request",
    "prediction",
    "prompt_embeds",
    "reasoning_effort",
    "web_search_options",
)
"""Known fields of OpenAI's and vLLM's APIs that would change the answer."""


def _refuse_tools(body: Body) -> None:
    if body.get("tools") is not None:
        raise ParameterError("tools", f"tools are not supported by this server, got {shown(body['tools'])}")
    if body.get("tool_choice") not in (None, "none"):
        raise ParameterError("tool_choice", f'only "none" is supported, got {shown(body["tool_choice"])}')
    field(body, "parallel_tool_calls", check_bool)


def _refuse_unsupported(body: Body) -> None:
    """A field this server cannot honour is an error, never silently without effect."""
    if field(body, "bad_words", check_list):
        raise ParameterError("bad_words", f"is not supported, got {shown(body['bad_words'])}")
    if body.get("structured_outputs") is not None:
        raise ParameterError("structured_outputs", f"is not supported, got {shown(body['structured_outputs'])}")
    response_format = field(body, "response_format", check_object)
    if response_format is not None and response_format.get("type") != "text":
        raise ParameterError("response_format", f'only type "text" is supported, got {shown(response_format)}')
    for name in UNSUPPORTED_FIELDS:
        if body.get(name):
            raise ParameterError(name, f"is not supported, got {shown(body[name])}")
    if body.get("modalities") not in (None, ["text"]):
        raise ParameterError("modalities", f'only ["text"] is supported, got {shown(body["modalities"])}')


def _widest(*counts: int | None) -> int | None:
    given = [count for count in counts if count is not None]
    if not given:
        return None
    return -1 if -1 in given else max(given)


def _check_truncation(name: str, value: Any, limits: Limits) -> int:
    count = check_int(name, value)
    if count != -1 and not 1 <= count < limits.max_model_len:
        raise ParameterError(name, f"must be -1 or in [1, {limits.max_model_len - 1}], got {count}")
    return limits.max_model_len - 1 if count == -1 else count


def _check_side(name: str, value: Any) -> str:
    if value not in ("left", "right"):
        raise ParameterError(name, f'must be "left" or "right", got {shown(value)}')
    return value


def _check_request_id(name: str, value: Any) -> str:
    if not REQUEST_ID.fullmatch(check_str(name, value)):
        raise ParameterError(name, f"must be 1 to 128 of A-Z a-z 0-9 . _ : -, got {shown(value)}")
    return value
