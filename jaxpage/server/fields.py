"""Owns how one field of a JSON body is read: there or not, of which type, within which limits.

It must not know which endpoint asks, or what a field means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxpage.errors import ParameterError, shown

Body = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the served model allows: ids below ``vocab_size``, ``max_model_len`` tokens, ``max_logprobs`` (-1: all).

    Attributes:
        max_n: samples of a prompt that a request may ask for.
        max_stop_strings: stop strings that a request may have.
        generation_config: the model's own defaults of sampling values.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_n: int
    max_stop_strings: int
    generation_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def field(body: Body, name: str, check: Callable[..., Any], default: Any = None, **limits: Any) -> Any:
    """``body[name]`` after ``check(name, value, **limits)``; null and absent give ``default``."""
    value = body.get(name)
    return default if value is None else check(name, value, **limits)


def check_str(name: str, value: Any) -> str:
    """``value`` if it is a string; raises ParameterError otherwise."""
    if not isinstance(value, str):
        raise ParameterError(name, f"must be a string, got {shown(value)}")
    return value


def check_object(name: str, value: Any) -> dict[str, Any]:
    """``value`` if it is a JSON object; raises ParameterError otherwise."""
    if not isinstance(value, dict):
        raise ParameterError(name, f"must be an object, got {shown(value)}")
    return value


def check_list(name: str, value: Any) -> list[Any]:
    """``value`` if it is a JSON list; raises ParameterError otherwise."""
    if not isinstance(value, list):
        raise ParameterError(name, f"must be a list, got {shown(value)}")
    return value
