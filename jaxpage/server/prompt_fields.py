"""Owns the fields that say what the prompts are: their shapes, and how much of them is kept.

It must not know endpoints, messages or how text is tokenized.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxpage.checks import check_int, check_token_ids
from jaxpage.errors import ParameterError, shown
from jaxpage.server.fields import Body, Limits, field

MAX_PROMPTS = 1024
Prompts = list[str | list[int]]


@dataclasses.dataclass(kw_only=True)
class PromptOptions:
    """How a text or a list of ids becomes a prompt.

    Attributes:
        add_special_tokens: of the tokenizer, such as one for the beginning; texts only.
        truncate_prompt_tokens: most tokens a prompt may keep, or None.
        truncation_side: "left" keeps the last tokens.
        num_reserved: tokens that must be left in the model's length for an answer.
    """

    add_special_tokens: bool
    truncate_prompt_tokens: int | None
    truncation_side: str
    num_reserved: ClassVar[int] = 1


def check_truncation(body: Body, limits: Limits, num_reserved: int = PromptOptions.num_reserved) -> dict[str, Any]:
    """The fields of ``PromptOptions`` that cut prompts; -1 stands for the longest prompt that can be served.

    Raises:
        ParameterError: for the first one that is wrong.
    """
    longest = limits.max_model_len - num_reserved
    return {
        "truncate_prompt_tokens": field(body, "truncate_prompt_tokens", _check_limit, longest=longest),
        "truncation_side": field(body, "truncation_side", _check_side, "left"),
    }


def check_prompts(
    body: Body, limits: Limits, name: str = "prompt", num_reserved: int = PromptOptions.num_reserved
) -> Prompts:
    """The field ``name`` in any of its four shapes as a list of prompts.

    Raises:
        ParameterError: naming the first bad index.
    """
    prompt = body.get(name)
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise ParameterError(name, f"must be text, token ids or a list of either, got {shown(prompt)}")
    if not prompt:
        raise ParameterError(name, "must not be empty")

    def ids(place: str, value: list[Any]) -> list[int]:
        if not value:
            raise ParameterError(place, "must hold at least one token")
        # Length first: a list that cannot be served is not worth looking at item by item.
        if body.get("truncate_prompt_tokens") is None and len(value) + num_reserved > limits.max_model_len:
            raise too_long(place, str(len(value)), limits.max_model_len, num_reserved)
        return check_token_ids(place, value, limits.vocab_size)

    if not isinstance(prompt[0], (str, list)):
        return [ids(name, prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise ParameterError(name, f"holds {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed")
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise ParameterError(f"{name}[{index}]", f"prompts must be of one kind, got {shown(item)}")
    return list(prompt) if kind is str else [ids(f"{name}[{index}]", item) for index, item in enumerate(prompt)]


def too_long(name: str, num_tokens: str, max_model_len: int, num_reserved: int) -> ParameterError:
    """The error for a prompt that leaves no room; ``num_tokens`` may say "at least N"."""
    included = " with the answer included" if num_reserved else ""
    return ParameterError(name, f"the prompt has {num_tokens} tokens, but max_model_len is {max_model_len}{included}")


def _check_limit(name: str, value: Any, longest: int) -> int:
    count = check_int(name, value)
    if count != -1 and not 1 <= count <= longest:
        raise ParameterError(name, f"must be -1 or in [1, {longest}], got {count}")
    return longest if count == -1 else count


def _check_side(name: str, value: Any) -> str:
    if value not in ("left", "right"):
        raise ParameterError(name, f'must be "left" or "right", got {shown(value)}')
    return value
