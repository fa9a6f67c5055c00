"""Owns the description of what the server answers: the JSON objects of each endpoint, and errors.

It must not know how answers are made.
"""

from __future__ import annotations

from jaxpage.server.errors import TYPES
from jaxpage.server.openapi.shapes import (
    ANYTHING,
    NULL,
    STRING,
    Schema,
    any_of,
    array,
    choice,
    integer,
    nullable,
    number,
    object_of,
    ref,
)

COUNT = integer(0)
IDS = array(COUNT)
FINISH = choice("stop", "length", "tool_calls")


def answer_schemas() -> dict[str, Schema]:
    """By component name, the objects of all answers."""
    return {
        "Error": object_of(
            {
                "error": object_of(
                    {
                        "message": STRING,
                        "type": choice(*dict.fromkeys(TYPES.values())),
                        "param": nullable(STRING),
                        "code": {"type": "integer", "enum": list(TYPES)},
                    }
                )
            }
        ),
        "Usage": object_of({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT} | _details()),
        "Completion": _whole("text_completion", _completion_choice()),
        "ChatCompletion": _whole("chat.completion", _chat_choice()),
        "Embeddings": object_of(
            {
                "object": choice("list"),
                "model": STRING,
                "data": array(
                    object_of(
                        {
                            "object": choice("embedding"),
                            "index": COUNT,
                            "embedding": any_of(array(number(), 1), STRING),
                        }
                    )
                ),
                "usage": object_of({"prompt_tokens": COUNT, "total_tokens": COUNT} | _details()),
            }
        ),
        "Model": object_of(
            {
                "id": STRING,
                "object": choice("model"),
                "created": COUNT,
                "owned_by": STRING,
                "root": STRING,
                "parent": NULL,
                "max_model_len": integer(1),
            }
        ),
        "Models": object_of({"object": choice("list"), "data": array(ref("Model"), 1)}),
        "Tokens": object_of(
            {"count": COUNT, "max_model_len": COUNT, "tokens": IDS, "token_strs": nullable(array(STRING))}
        ),
        "Text": object_of({"prompt": STRING}),
        "TokenizerInfo": object_of(
            {"tokenizer_class": STRING, "vocab_size": COUNT}
            | dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"), nullable(STRING))
            | dict.fromkeys(("bos_token_id", "eos_token_id"), nullable(COUNT))
        ),
        "Version": object_of({"version": STRING}),
        "Load": object_of({"server_load": COUNT}),
    }


def _details() -> dict[str, Schema]:
    return {"prompt_tokens_details": object_of({"cached_tokens": COUNT})}


def _whole(kind: str, answer_choice: Schema) -> Schema:
    return object_of(
        {
            "id": STRING,
            "object": choice(kind),
            "created": COUNT,
            "model": STRING,
            "system_fingerprint": STRING,
            "choices": array(answer_choice, 1),
            "usage": ref("Usage"),
        }
    )


def _ending() -> dict[str, Schema]:
    return {"finish_reason": FINISH, "stop_reason": any_of(STRING, COUNT, NULL)}


def _completion_choice() -> Schema:
    scores = object_of(
        {
            "tokens": array(STRING),
            "token_logprobs": array(nullable(number(None, 0))),
            "top_logprobs": array(nullable({"type": "object", "additionalProperties": number(None, 0)})),
            "text_offset": IDS,
        }
    )
    return object_of(
        {"index": COUNT, "text": STRING, "logprobs": nullable(scores)} | _ending(),
        {"token_ids": IDS, "prompt_token_ids": IDS, "prompt_logprobs": array(nullable({"type": "object"}))},
    )


def _chat_choice() -> Schema:
    call = object_of(
        {"id": STRING, "type": choice("function"), "function": object_of({"name": STRING, "arguments": STRING})}
    )
    message = object_of(
        {"role": choice("assistant"), "content": nullable(STRING), "refusal": NULL},
        {"tool_calls": array(call, 1), "reasoning_content": STRING},
    )
    token = {"token": STRING, "logprob": number(None, 0), "bytes": nullable(array(integer(0, 255)))}
    scores = object_of(
        {"content": array(object_of(token | {"top_logprobs": array(object_of(token))})), "refusal": NULL}
    )
    return object_of(
        {"index": COUNT, "message": message, "logprobs": nullable(scores)} | _ending(),
        {"token_ids": IDS, "prompt_token_ids": IDS, "prompt_logprobs": ANYTHING},
    )
