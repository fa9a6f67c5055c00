"""Owns the description of what clients may send: the fields of each endpoint that takes a body.

It must not know how fields are checked; it repeats the types and ranges, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpage.params import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BEAM_WIDTH,
    MAX_N,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_TOKEN_IDS,
)
from jaxpage.server.chat_protocol import MAX_TEMPLATE_LENGTH, REASONING_EFFORTS
from jaxpage.server.embeddings import ENCODINGS
from jaxpage.server.fields import Limits
from jaxpage.server.messages import MAX_MESSAGES
from jaxpage.server.openapi.shapes import (
    ANYTHING,
    BOOLEAN,
    INT64,
    NOTHING,
    NULL,
    STRING,
    Schema,
    any_of,
    array,
    choice,
    integer,
    number,
    object_of,
)
from jaxpage.server.prompt_fields import MAX_PROMPTS
from jaxpage.server.protocol import REQUEST_ID, UNSUPPORTED_FIELDS
from jaxpage.server.tools.definitions import MAX_TOOLS

REQUEST_ID_TEXT: Schema = {"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"}
CACHE_SALT: Schema = {"type": "string", "pattern": r"^[^\x00-\x1f\x7f]{1,128}$"}
Fields = dict[str, Schema]


def request_schemas(limits: Limits, names: Sequence[str]) -> Fields:
    """By component name, the bodies that the endpoints take."""
    return {
        "CompletionRequest": object_of({"prompt": prompts(limits)}, _completion_fields(limits, names)),
        "ChatRequest": object_of({"messages": _messages()}, _chat_fields(limits, names)),
        "EmbeddingRequest": object_of({"input": prompts(limits)}, _embedding_fields(limits, names)),
        "TokenizeRequest": any_of(
            object_of(
                {"prompt": STRING},
                {
                    "messages": NULL,
                    "model": choice(*names),
                    "add_special_tokens": BOOLEAN,
                    "return_token_strs": BOOLEAN,
                },
            ),
            object_of(
                {"messages": _messages()},
                {"prompt": NULL, "model": choice(*names), "add_special_tokens": BOOLEAN, "return_token_strs": BOOLEAN}
                | _template_fields(),
            ),
        ),
        "DetokenizeRequest": object_of({"tokens": array(integer(0, limits.vocab_size - 1))}, {"model": choice(*names)}),
    }


def prompts(limits: Limits) -> Schema:
    """A prompt in one of its four shapes."""
    ids = array(integer(0, limits.vocab_size - 1), 1)
    text: Schema = {"type": "string", "minLength": 1}
    return any_of(text, array(text, 1, MAX_PROMPTS), ids, array(ids, 1, MAX_PROMPTS))


def _completion_fields(limits: Limits, names: Sequence[str]) -> Fields:
    return _shared_fields(limits, names) | {
        "max_tokens": integer(0, limits.max_model_len),
        "logprobs": _logprobs(limits),
        "echo": BOOLEAN,
        "suffix": {"type": "string", "maxLength": 0},
        "best_of": integer(1, limits.max_n),
    }


def _chat_fields(limits: Limits, names: Sequence[str]) -> Fields:
    return (
        _shared_fields(limits, names)
        | _template_fields()
        | {
            "max_completion_tokens": integer(1, limits.max_model_len),
            "max_tokens": integer(1, limits.max_model_len),
            "logprobs": BOOLEAN,
            "top_logprobs": _logprobs(limits),
            "echo": BOOLEAN,
            "best_of": integer(1, limits.max_n),
            "include_reasoning": BOOLEAN,
            "store": {"type": "boolean", "const": False},
            "service_tier": choice("auto", "default"),
            "verbosity": choice("medium"),
        }
    )


def _template_fields() -> Fields:
    return {
        "tools": array(_tool(), 1, MAX_TOOLS),
        "tool_choice": any_of(choice("none", "auto", "required"), _named_tool()),
        "parallel_tool_calls": BOOLEAN,
        "add_generation_prompt": BOOLEAN,
        "continue_final_message": BOOLEAN,
        "chat_template": {"type": "string", "minLength": 1, "maxLength": MAX_TEMPLATE_LENGTH},
        "chat_template_kwargs": {"type": "object"},
        "reasoning_effort": choice(*REASONING_EFFORTS),
        "documents": array(ANYTHING),
    }


def _embedding_fields(limits: Limits, names: Sequence[str]) -> Fields:
    return _prompt_fields(limits, names, limits.max_model_len) | {
        "encoding_format": choice(*ENCODINGS),
        "dimensions": integer(1),
        "pooling": choice("last", "mean"),
        "normalize": BOOLEAN,
        "user": STRING,
    }


def _prompt_fields(limits: Limits, names: Sequence[str], longest: int) -> Fields:
    return {
        "model": choice(*names),
        "add_special_tokens": BOOLEAN,
        "truncate_prompt_tokens": integer(-1, longest),
        "truncation_side": choice("left", "right"),
        "cache_salt": CACHE_SALT,
        "priority": {"type": "integer"} | INT64,
    }


def _shared_fields(limits: Limits, names: Sequence[str]) -> Fields:
    ids = array(integer(0, limits.vocab_size - 1))
    stop: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_LENGTH}
    word: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_LENGTH}
    return (
        _prompt_fields(limits, names, limits.max_model_len - 1)
        | {
            "n": integer(1, MAX_BEAM_WIDTH if limits.max_n == MAX_N else limits.max_n),
            "temperature": number(0, 2),
            "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "top_k": integer(-1),
            "min_p": number(0, 1),
            "presence_penalty": number(-2, 2),
            "frequency_penalty": number(-2, 2),
            "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
            "seed": {"type": "integer"} | INT64,
            "stop": any_of(stop, array(stop, 0, limits.max_stop_strings)),
            "stop_token_ids": ids | {"maxItems": MAX_STOP_TOKEN_IDS},
            "ignore_eos": BOOLEAN,
            "min_tokens": integer(0, limits.max_model_len),
            "skip_special_tokens": BOOLEAN,
            "spaces_between_special_tokens": BOOLEAN,
            "include_stop_str_in_output": BOOLEAN,
            "logit_bias": _logit_bias(limits),
            "allowed_token_ids": ids | {"minItems": 1, "maxItems": limits.vocab_size},
            "bad_words": array(word, 0, MAX_BAD_WORDS),
            "use_beam_search": BOOLEAN,
            "length_penalty": number(),
            "early_stopping": any_of(BOOLEAN, choice("never")),
            "prompt_logprobs": _logprobs(limits),
            "response_format": _response_format(),
            "structured_outputs": _structured_outputs(),
            "guided_json": any_of(STRING, {"type": "object"}),
            "guided_regex": STRING,
            "guided_choice": array(STRING, 1),
            "guided_grammar": STRING,
            "guided_whitespace_pattern": NULL,
            "stream": BOOLEAN,
            "stream_options": object_of({}, {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN}),
            "stream_interval": integer(1),
            "return_tokens_as_token_ids": BOOLEAN,
            "return_token_ids": BOOLEAN,
            "request_id": REQUEST_ID_TEXT,
            "user": STRING,
            "modalities": array(choice("text"), 1, 1),
            "beam_width": NULL,
        }
        | dict.fromkeys(UNSUPPORTED_FIELDS, NOTHING)
    )


def _logprobs(limits: Limits) -> Schema:
    return integer(-1) if limits.max_logprobs == -1 else integer(0, limits.max_logprobs)


def _logit_bias(limits: Limits) -> Schema:
    return {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,7}$"}, "additionalProperties": number(-100, 100)}


def _response_format() -> Schema:
    described = object_of(
        {"name": {"type": "string", "minLength": 1}, "schema": {"type": "object"}},
        {"description": STRING, "strict": BOOLEAN},
    )
    return any_of(
        object_of({"type": choice("text", "json_object")}),
        object_of({"type": choice("json_schema"), "json_schema": described}),
    )


def _structured_outputs() -> Schema:
    kinds: Fields = {
        "json": any_of(STRING, {"type": "object"}),
        "regex": STRING,
        "choice": array(STRING, 1),
        "grammar": STRING,
        "json_object": {"type": "boolean", "const": True},
    }
    return any_of(*(object_of({kind: schema}) for kind, schema in kinds.items()))


def _messages() -> Schema:
    part = object_of({"type": choice("text"), "text": STRING})
    call = object_of(
        {
            "function": object_of(
                {"name": STRING, "arguments": {"type": "string", "contentMediaType": "application/json"}}
            )
        }
    )
    role: Schema = {"type": "string", "minLength": 1}
    content = any_of(STRING, array(part, 1))
    message = any_of(
        object_of({"role": role, "content": content}, {"name": STRING, "tool_call_id": STRING}),
        object_of({"role": choice("assistant"), "tool_calls": array(call, 1)}, {"content": content, "name": STRING}),
    )
    return array(message, 1, MAX_MESSAGES)


def _tool() -> Schema:
    name: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
    function = object_of({"name": name}, {"description": STRING, "parameters": {"type": "object"}, "strict": BOOLEAN})
    return object_of({"function": function}, {"type": choice("function")})


def _named_tool() -> Schema:
    return object_of({"type": choice("function"), "function": object_of({"name": STRING})})
