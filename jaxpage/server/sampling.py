"""Owns the fields that say how tokens are chosen: by sampling, or by a beam search.

It must not know prompts, endpoints or the engine.
"""

from __future__ import annotations

from typing import Any

from jaxpage.checks import check_bool, check_float, check_int
from jaxpage.config import RECOMMENDED_VALUES
from jaxpage.errors import ParameterError, shown
from jaxpage.params import MAX_BEAM_WIDTH, MAX_N, BeamSearchParams, RequestOutputKind, SamplingParams
from jaxpage.server.fields import Body, Limits, check_list, field
from jaxpage.server.structured import StructuredField

_SAMPLING_FIELDS = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
_BEAM_FIELDS = (
    "length_penalty",
    "early_stopping",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def generation_params(
    body: Body,
    limits: Limits,
    structured: StructuredField | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams | BeamSearchParams:
    """How to generate, as the body says; the last arguments are the fields that the endpoints spell differently.

    Raises:
        ParameterError: for a wrong field, or one that would have no effect.
    """
    if body.get("beam_width") is not None:
        raise ParameterError("beam_width", f"is called n here, got {shown(body['beam_width'])}")
    if field(body, "use_beam_search", check_bool, False):
        if prompt_logprobs is not None:
            # Echoed logprobs score the prompt, too: then it is echo that asks for too much.
            name = "prompt_logprobs" if body.get("prompt_logprobs") is not None else "echo"
            raise ParameterError(name, "prompts are not scored with use_beam_search")
        if structured is not None:
            raise ParameterError(structured.name.split(".")[0], "cannot be combined with use_beam_search")
        return _beam_search_params(body, limits, max_tokens, logprobs)
    if field(body, "length_penalty", check_float, 1.0) != 1:
        raise ParameterError("length_penalty", f"needs use_beam_search true, got {shown(body['length_penalty'])}")
    if body.get("early_stopping") is not None and body["early_stopping"] is not False:
        raise ParameterError("early_stopping", f"needs use_beam_search true, got {shown(body['early_stopping'])}")
    field(body, "n", check_int, low=1, high=limits.max_n)
    values = {name: limits.generation_config[name] for name in RECOMMENDED_VALUES if name in limits.generation_config}
    params = SamplingParams(
        **(values | _given(body, limits)),
        structured_outputs=None if structured is None else structured.params,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        output_kind=RequestOutputKind.DELTA,
    )
    params.validate_for(limits.vocab_size, limits.max_model_len, limits.max_logprobs)
    return params


def _beam_search_params(body: Body, limits: Limits, max_tokens: int | None, logprobs: int | None) -> BeamSearchParams:
    if field(body, "stream", check_bool, False):
        raise ParameterError("stream", "cannot be combined with use_beam_search")
    _refuse_sampling_values(body, limits)
    # Samples and beams have limits of their own; the operator's is for both where it is below them.
    width = field(body, "n", check_int, 1, low=1, high=MAX_BEAM_WIDTH if limits.max_n == MAX_N else limits.max_n)
    if field(body, "best_of", check_int, width) != width:
        raise ParameterError("best_of", f"is only supported equal to n ({width}), got {body['best_of']}")
    if logprobs == -1 and limits.max_logprobs == -1:
        logprobs = limits.vocab_size
    values = {name: body[name] for name in _BEAM_FIELDS if body.get(name) is not None}
    params = BeamSearchParams(**(values | {"beam_width": width, "max_tokens": max_tokens, "logprobs": logprobs}))
    params.validate_for(limits.vocab_size, limits.max_model_len, limits.max_logprobs)
    return params


def _refuse_sampling_values(body: Body, limits: Limits) -> None:
    """A beam search samples nothing and takes the model's own scores: values that would change these are errors."""
    given = _given(body, limits)
    params = SamplingParams(**{name: value for name, value in given.items() if name not in ("n", "best_of")})
    neutral = SamplingParams()
    is_off = {"temperature": params.is_greedy, "top_k": params.top_k == -1 or params.top_k >= limits.vocab_size}
    for name, value in given.items():
        if name in ("n", "best_of", *_BEAM_FIELDS) or is_off.get(name):
            continue
        if getattr(params, name) != getattr(neutral, name):
            raise ParameterError(name, f"has no effect with use_beam_search, got {shown(value)}")


def _given(body: Body, limits: Limits) -> dict[str, Any]:
    """The sampling fields that the body has, with those checked whose size or type says enough."""
    allowed = body.get("allowed_token_ids")
    if isinstance(allowed, list) and len(allowed) > limits.vocab_size:
        raise ParameterError("allowed_token_ids", f"holds {len(allowed)} ids, the vocabulary has {limits.vocab_size}")
    field(body, "stop_token_ids", check_list)
    stop = body.get("stop")
    if isinstance(stop, list) and len(stop) > limits.max_stop_strings:
        raise ParameterError("stop", f"holds {len(stop)} strings, at most {limits.max_stop_strings} are allowed")
    return {name: body[name] for name in _SAMPLING_FIELDS if body.get(name) is not None}
