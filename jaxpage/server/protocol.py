"""Owns what clients may send to generate text: the fields of completions and those that chat shares with them.

It must not know how prompts are tokenized, how answers look or how the engine works.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from jaxpage.checks import check_bool, check_cache_salt, check_int
from jaxpage.errors import ConflictError, ParameterError, shown
from jaxpage.params import BeamSearchParams, SamplingParams
from jaxpage.server.fields import Body, Limits, check_object, check_str, field
from jaxpage.server.prompt_fields import PromptOptions, Prompts, check_prompts, check_truncation
from jaxpage.server.sampling import generation_params
from jaxpage.server.structured import StructuredField, structured_field

Params = SamplingParams | BeamSearchParams
LIGHT_CHARACTERS = 1000
"""A tokenizer takes a microsecond for one at most."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclasses.dataclass(kw_only=True)
class GenerationRequest(PromptOptions):
    """The fields both generating endpoints share.

    Attributes:
        params: BeamSearchParams if the client wants beams, whose ``beam_width`` it calls n.
        num_logprobs: alternatives shown for each token; None shows no logprobs at all.
        num_prompt_logprobs: the same for the list ``prompt_logprobs``.
        stream_interval: tokens in one chunk.
        structured_name: the client's path of what the text has to be, None for free text.
    """

    model: str | None
    params: Params
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stream_interval: int
    tokens_as_ids: bool
    return_token_ids: bool
    cache_salt: str | None
    priority: int
    request_id: str | None
    structured_name: str | None

    @property
    def num_choices(self) -> int:
        """Choices of each prompt: samples or beams."""
        return self.params.n if isinstance(self.params, SamplingParams) else self.params.beam_width

    def check_params(self, check: Callable[[Params], None]) -> None:
        """Runs the engine's ``check`` of parameters; raises ParameterError under the client's name of what is wrong."""
        try:
            check(self.params)
        except ParameterError as error:
            raise self._in_client_terms(error, check) from None

    def _in_client_terms(self, error: ParameterError, check: Callable[[Params], None]) -> ParameterError:
        if self.structured_name is not None and error.parameter.startswith("structured_outputs"):
            return ParameterError(self.structured_name, error.reason)
        if isinstance(error, ConflictError) and error.other == "structured_outputs":
            return ConflictError(error.parameter, error.value, self._constraint_name)
        return ParameterError("n", error.reason) if error.parameter == "beam_width" else error

    @property
    def _constraint_name(self) -> str:
        """The client's name for what the text has to be."""
        return (self.structured_name or "structured_outputs").split(".")[0]

    @property
    def is_light(self) -> bool:
        """True if its prompts are made and checked in well under a millisecond."""
        params = self.params
        is_plain = isinstance(params, BeamSearchParams) or not (params.structured_outputs or params.bad_words)
        return is_plain and self._num_characters() <= LIGHT_CHARACTERS

    def _num_characters(self) -> float:
        """What there is to tokenize, in characters or ids."""
        raise NotImplementedError

    @property
    def scores_prompts(self) -> bool:
        """True when the engine is asked for scores of the prompts."""
        return isinstance(self.params, SamplingParams) and self.params.prompt_logprobs is not None


@dataclasses.dataclass(kw_only=True)
class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompts: Prompts

    def _num_characters(self) -> float:
        return sum(map(len, self.prompts))


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
    structured = structured_field(body)
    params = generation_params(
        body,
        limits,
        structured,
        max_tokens=max_tokens,
        logprobs=num_logprobs,
        # Echoed prompts are scored like generated tokens; one computation serves both lists.
        prompt_logprobs=_widest(num_logprobs if echo else None, num_prompt_logprobs),
    )
    shared = shared_fields(body, limits, params, structured, num_logprobs, num_prompt_logprobs)
    add_special_tokens = field(body, "add_special_tokens", check_bool, True)
    return CompletionRequest(prompts=prompts, echo=echo, add_special_tokens=add_special_tokens, **shared)


def shared_fields(
    body: Body,
    limits: Limits,
    params: Params,
    structured: StructuredField | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> dict[str, Any]:
    """The fields of ``GenerationRequest`` that both endpoints spell alike."""
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
        **check_truncation(body, limits),
        "cache_salt": field(body, "cache_salt", check_cache_salt),
        "priority": field(body, "priority", check_int, 0, low=-(2**63), high=2**63 - 1),
        "request_id": field(body, "request_id", _check_request_id),
        "structured_name": None if structured is None else structured.name,
    }


UNSUPPORTED_FIELDS = (
    "audio",
    "function_call",
    "functions",
    "lora_request",
    "prediction",
    "prompt_embeds",
    "web_search_options",
)
"""Known fields of OpenAI's and vLLM's APIs that would change the answer."""


def _refuse_unsupported(body: Body) -> None:
    """A field this server cannot honour is an error, never silently without effect."""
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


def _check_request_id(name: str, value: Any) -> str:
    if not REQUEST_ID.fullmatch(check_str(name, value)):
        raise ParameterError(name, f"must be 1 to 128 of A-Z a-z 0-9 . _ : -, got {shown(value)}")
    return value
